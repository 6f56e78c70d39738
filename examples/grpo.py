"""Train a tiny language model with GRPO to answer with sorted digits. Nothing is downloaded.

    python examples/grpo.py [--output_dir out] [--steps 150] [--seed 42]

The model starts from random weights and is fine-tuned to answer with three digits in random order, so some answers are
sorted by chance. Then GRPO samples eight answers to each question, and a reward function checks which are sorted.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from pathlib import Path

import tiny_model
from datasets import Dataset
from plot import Curve, text_plot, write_svg
from transformers import AutoTokenizer, PrinterCallback

from trl_jax import AutoModelForCausalLM, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

MOST_TOKENS, DIGITS = 6, "0123456789"
COMMON = {
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,  # remove these two lines to use a GPU or a TPU
    "bf16": False,
}


def main() -> None:
    options = read_options()
    out, began = Path(options.output_dir), time.perf_counter()
    train, test = questions()
    model = fine_tuned(train, out, options.seed)
    before = answers(model, test[:4])

    trainer = make_trainer(str(model), out, train, test, options)
    trainer.train()
    trainer.save_model(str(out / "final"))
    print(f"Trained twice in {time.perf_counter() - began:.0f} seconds.\n")
    after = answers(out / "final", test[:4])
    for row, first, last in zip(test, before, after, strict=False):
        print(f"{row['prompt'][0]['content']:<24} before: {first:<10} after: {last}")
    show_rewards(trainer.state.log_history, out / "rewards.svg")
    print(f"The model is in {out / 'final'}.")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a tiny language model with GRPO to sort digits.")
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def questions() -> tuple[list[dict], list[dict]]:
    """Prompts for training, and every fifth one held out."""
    rows = [
        {"prompt": [{"role": "user", "content": f"{please} {what}."}]}
        for please, what in itertools.product(
            ("Name", "Write", "Give me", "Tell me"), ("three digits", "any three digits", "some digits", "a few digits")
        )
    ]
    return [row for number, row in enumerate(rows) if number % 5], rows[::5]


def is_sorted(completions, **columns) -> list[float]:
    """Reward 1.0 for an answer of exactly three increasing digits."""
    answers = [messages[0]["content"].split() for messages in completions]
    return [float(len(digits) == 3 and digits == sorted(set(DIGITS) & set(digits))) for digits in answers]


def fine_tuned(train: list[dict], out: Path, seed: int, *, in_order: bool = False, **shape: int) -> Path:
    """Fine-tune to answer with three digits, sorted if `in_order`. Returns the folder of the model."""
    start = tiny_model.build(out / "start", [*texts(train), " ".join(DIGITS)], seed=seed, **shape)
    rng = random.Random(seed)
    rows = []
    for row in train * 40:
        digits = rng.sample(DIGITS, 3)
        answer = " ".join(sorted(digits) if in_order else digits)
        rows.append({"prompt": row["prompt"], "completion": [{"role": "assistant", "content": answer}]})
    args = SFTConfig(
        str(out), num_train_epochs=8, seed=seed, learning_rate=3e-3, warmup_steps=20, per_device_train_batch_size=16,
        **COMMON,
    )  # fmt: skip
    trainer = SFTTrainer(model=str(start), args=args, train_dataset=Dataset.from_list(rows))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(str(out / "fine-tuned"))
    return out / "fine-tuned"


def make_trainer(
    model: str, out: Path, train: list[dict], test: list[dict], options: argparse.Namespace
) -> GRPOTrainer:
    """Each step samples eight answers to each of eight questions."""
    args = GRPOConfig(
        output_dir=str(out),
        max_steps=options.steps,
        seed=options.seed,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=MOST_TOKENS,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        eval_on_start=True,
        num_generations_eval=8,
        per_device_eval_batch_size=32,
        **COMMON,
    )
    datasets = {"train_dataset": Dataset.from_list(train), "eval_dataset": Dataset.from_list(test)}
    trainer = GRPOTrainer(model=model, reward_funcs=is_sorted, args=args, **datasets)
    trainer.remove_callback(PrinterCallback)
    return trainer


def texts(rows: list[dict]) -> list[str]:
    return [row["prompt"][0]["content"] for row in rows]


def answers(folder: Path, rows: list[dict]) -> list[str]:
    """Answers of a saved model, sampled as in training."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    how = {"max_new_tokens": MOST_TOKENS, "do_sample": True, "top_k": 0, "seed": 1}
    return [text.strip() for text in model.generate_text([row["prompt"] for row in rows], tokenizer, **how)]


def show_rewards(history: list[dict], path: Path) -> None:
    """Plot the mean rewards of answers to held-out questions."""
    points = [(entry["step"], entry["eval_reward"]) for entry in history if "eval_reward" in entry]
    trained = [(entry["step"], entry["reward"]) for entry in history if "reward" in entry]
    unseen = Curve("Share of correct answers to held-out questions", points, 0.0, 1.0, "#1a7f37")
    print(text_plot(unseen))
    write_svg(path, [Curve("Share of correct answers during training", trained, 0.0, 1.0), unseen])
    print(f"\nThe share of correct answers went from {points[0][1]:.2f} to {points[-1][1]:.2f}. Picture: {path}")


if __name__ == "__main__":
    main()
