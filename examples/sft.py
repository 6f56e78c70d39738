"""Fine-tune a tiny language model on a few chats, and look at its answers before and after. Nothing is downloaded.

    python examples/sft.py [--output_dir out] [--epochs 40] [--seed 42]

The model knows nothing at first: its weights are noise. It is asked for capitals in four ways; of one country in four,
one way is kept back, and answered only by a model that has learned what the question means.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import tiny_model
from capitals import answers, chats, read_options, show, texts
from datasets import Dataset

from trl_jax import SFTConfig, SFTTrainer


def main() -> None:
    options = read_options("Fine-tune a tiny language model on a few chats.", epochs=40)
    out, (train, test) = Path(options.output_dir), chats()
    start = tiny_model.build(out / "start", texts([*train, *test]), seed=options.seed)
    trainer = make_trainer(str(start), out, train, test, options)
    before, began = answers(start, test), time.perf_counter()
    trainer.train()
    print(f"Trained on {len(train)} chats in {time.perf_counter() - began:.0f} seconds.\n")
    trainer.save_model(str(out / "final"))
    show(test, "completion", before, answers(out / "final", test))
    history = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    first, last = history[0], history[-1]
    print(f"\nOn {len(test)} questions that were kept back, the loss went from {first['eval_loss']:.2f} to ", end="")
    right = [entry["eval_mean_token_accuracy"] for entry in (first, last)]
    print(f"{last['eval_loss']:.2f}, and tokens that are right from {right[0]:.2f} to {right[1]:.2f}. ", end="")
    print(f"The model is in {out / 'final'}.")


def make_trainer(model: str, out: Path, train: list[dict], test: list[dict], options: argparse.Namespace) -> SFTTrainer:
    """Only completions are learned, as the rows have prompts, too."""
    args = SFTConfig(
        output_dir=str(out),
        num_train_epochs=options.epochs,
        seed=options.seed,
        per_device_train_batch_size=10,
        learning_rate=3e-3,
        warmup_steps=20,
        logging_steps=40,
        eval_strategy="steps",
        eval_steps=40,
        eval_on_start=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,  # leave these two out where there is a GPU or a TPU
        bf16=False,
    )
    datasets = {"train_dataset": Dataset.from_list(train), "eval_dataset": Dataset.from_list(test)}
    return SFTTrainer(model=model, args=args, **datasets)


if __name__ == "__main__":
    main()
