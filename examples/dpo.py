"""Train a tiny language model with DPO to stop brushing questions off. Nothing is downloaded.

    python examples/dpo.py [--output_dir out] [--epochs 10] [--seed 42]

The model starts from random weights and is fine-tuned on chats that brush most questions off, so it learns to do that.
Then DPO trains it on pairs of an answer and a rebuff to the same question. Some questions are held out.
"""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

import tiny_model
from capitals import answers, chats, read_options, show, texts
from datasets import Dataset
from plot import Curve, text_plot, write_svg
from transformers import PrinterCallback

from trl_jax import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

REBUFF = "Look it up yourself."
COMMON = {
    "per_device_train_batch_size": 10,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,  # remove these two lines to use a GPU or a TPU
    "bf16": False,
}


def main() -> None:
    options = read_options("Train a tiny language model with DPO.", epochs=10)
    out, began = Path(options.output_dir), time.perf_counter()
    train, test = (pairs(rows) for rows in chats())
    model = fine_tuned(train, test, out, options.seed)
    before = answers(model, test)

    trainer = make_trainer(str(model), out, train, test, options)
    trainer.train()
    trainer.save_model(str(out / "final"))
    print(f"Trained twice in {time.perf_counter() - began:.0f} seconds.\n")
    after = answers(out / "final", test)
    show(test, "chosen", before, after)
    counts = [sum(said.lower() == REBUFF.lower() for said in both) for both in (before, after)]
    print(f"Questions that were brushed off: {counts[0]} before, {counts[1]} after.\n")
    show_rewards([entry for entry in trainer.state.log_history if "eval_loss" in entry], out / "rewards.svg")
    print(f"The model is in {out / 'final'}.")


def pairs(rows: list[dict]) -> list[dict]:
    rejected = [{"role": "assistant", "content": REBUFF}]
    return [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": rejected} for row in rows]


def fine_tuned(train: list[dict], test: list[dict], out: Path, seed: int) -> Path:
    """Fine-tune on both kinds of answers, with twice as many rebuffs. Returns the folder of the model."""
    start = tiny_model.build(out / "start", texts([*train, *test]), seed=seed)
    sides = ("chosen", "rejected", "rejected")
    rows = [{"prompt": row["prompt"], "completion": row[side]} for row in train for side in sides]
    args = SFTConfig(str(out), num_train_epochs=30, seed=seed, learning_rate=3e-3, warmup_steps=20, **COMMON)
    trainer = SFTTrainer(model=str(start), args=args, train_dataset=Dataset.from_list(rows))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(str(out / "fine-tuned"))
    return out / "fine-tuned"


def make_trainer(model: str, out: Path, train: list[dict], test: list[dict], options: Namespace) -> DPOTrainer:
    """Without a `ref_model`, the reference is the model before training. The "sft" loss keeps chosen answers likely."""
    args = DPOConfig(
        output_dir=str(out),
        num_train_epochs=options.epochs,
        seed=options.seed,
        learning_rate=3e-4,
        beta=0.1,
        loss_type=["sigmoid", "sft"],
        loss_weights=[1.0, 0.5],
        logging_steps=6,
        eval_strategy="steps",
        eval_steps=6,
        eval_on_start=True,
        **COMMON,
    )
    datasets = {"train_dataset": Dataset.from_list(train), "eval_dataset": Dataset.from_list(test)}
    trainer = DPOTrainer(model=model, args=args, **datasets)
    trainer.remove_callback(PrinterCallback)
    return trainer


def show_rewards(history: list[dict], path: Path) -> None:
    """Plot the rewards: beta * log(p / p_ref) of an answer."""
    points = {
        name: [(entry["step"], entry[f"eval_rewards/{name}"]) for entry in history]
        for name in ("chosen", "rejected", "margins")
    }
    values = [value for curve in points.values() for _, value in curve]
    low, high = min(values), max(values)
    margins = Curve("Margin: rewards of chosen minus rejected answers", points["margins"], low, high)
    colors = {"chosen": "#1a7f37", "rejected": "#d1242f"}
    sides = [
        Curve(f"Rewards of {name} answers to unseen questions", points[name], low, high, color)
        for name, color in colors.items()
    ]
    print(text_plot(margins))
    write_svg(path, [*sides, margins])
    first, last = points["margins"][0][1], points["margins"][-1][1]
    print(f"\nThe margin went from {first:.2f} to {last:.2f}. Picture: {path}")


if __name__ == "__main__":
    main()
