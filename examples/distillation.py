"""Distill a larger model that answers with sorted digits into a small one, on-policy. Nothing is downloaded.

    python examples/distillation.py [--output_dir out] [--steps 100] [--seed 42]

Both start from random weights and are fine-tuned to answer with three digits: the teacher in sorted order, the student
in random order. Then the student samples answers and learns the teacher's distribution at each token. There is no
reward.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from datasets import Dataset
from grpo import COMMON, MOST_TOKENS, answers, fine_tuned, is_sorted, questions
from plot import Curve, text_plot, write_svg
from transformers import PrinterCallback

from trl_jax import DistillationConfig, DistillationTrainer

SMALL = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8}


def main() -> None:
    options = read_options()
    out, began = Path(options.output_dir), time.perf_counter()
    train, test = questions()
    teacher = fine_tuned(train, out / "teacher", options.seed, in_order=True, hidden_size=128, head_dim=32)
    student = fine_tuned(train, out / "student", options.seed, **SMALL)

    trainer = make_trainer(str(student), str(teacher), out, train, test, options)
    trainer.train()
    trainer.save_model(str(out / "final"))
    print(f"Trained three times in {time.perf_counter() - began:.0f} seconds.\n")
    show_divergence(trainer.state.log_history, out / "divergence.svg")
    best, before, after = (share_sorted(folder, test) for folder in (teacher, student, out / "final"))
    print(
        f"Sorted answers to held-out questions: teacher {best:.2f}, student {before:.2f} before and {after:.2f} after."
    )
    print(f"The model is in {out / 'final'}.")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Distill a larger model that sorts digits into a small one.")
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def make_trainer(
    student: str, teacher: str, out: Path, train: list[dict], test: list[dict], options: argparse.Namespace
) -> DistillationTrainer:
    """Each step samples the student's answers to 64 questions."""
    args = DistillationConfig(
        output_dir=str(out),
        max_steps=options.steps,
        seed=options.seed,
        per_device_train_batch_size=64,
        max_completion_length=MOST_TOKENS,
        learning_rate=3e-3,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        eval_on_start=True,
        per_device_eval_batch_size=32,
        **COMMON,
    )
    datasets = {"train_dataset": Dataset.from_list(train * 8), "eval_dataset": Dataset.from_list(test * 8)}
    trainer = DistillationTrainer(student, teacher, args=args, **datasets)
    trainer.remove_callback(PrinterCallback)
    return trainer


def share_sorted(folder: Path, rows: list[dict]) -> float:
    texts = answers(folder, rows * 16)
    scores = is_sorted([[{"content": text}] for text in texts])
    return sum(scores) / len(scores)


def show_divergence(history: list[dict], path: Path) -> None:
    """Plot the divergence of the student from the teacher on the student's answers to held-out questions."""
    points = [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]
    curve = Curve(
        "KL(student || teacher) on held-out questions, nats per token", points, 0.0, max(y for _, y in points)
    )
    print(text_plot(curve))
    write_svg(path, [curve])
    print(f"\nThe divergence went from {points[0][1]:.2f} to {points[-1][1]:.2f}. Picture: {path}")


if __name__ == "__main__":
    main()
