"""Train a tiny reward model on the pairs in data/, plot its accuracy, load it again and score two answers.

python examples/quickstart.py [--output_dir out] [--epochs 4] [--seed 42]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import tiny_model
from datasets import Dataset, load_dataset
from plot import Curve, text_plot, write_svg
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback

from trl_jax import AutoModelForSequenceClassification, RewardConfig, RewardTrainer

DATA = Path(__file__).parent / "data"

QUESTION = "How do I keep my bicycle chain from rusting?"
HELPFUL = "Wipe it dry after wet rides, and add a drop of oil now and then. I'd clean it with a brush first."
DISMISSIVE = "Chains rust, they just do. I don't see why anyone makes a fuss over it, buy another bike."


def main() -> None:
    options = read_options()
    out = Path(options.output_dir)
    files = {"train": DATA / "preferences_train.jsonl", "test": DATA / "preferences_test.jsonl"}
    pairs = load_dataset("json", data_files={split: str(file) for split, file in files.items()})
    start = tiny_model.build(out / "start", texts(pairs["train"]))

    trainer = make_trainer(str(start), out, pairs["train"], pairs["test"], options)
    print(f"Training on {len(pairs['train'])} pairs, evaluating on {len(pairs['test'])} others:\n")
    began = time.perf_counter()
    trainer.train()
    print(f"\n{time.perf_counter() - began:.0f} seconds.\n")
    trainer.save_model(str(out / "final"))

    show_curve(trainer.state.log_history, out / "curve.svg")
    check_saved(out / "final", pairs["test"], trainer.predict(pairs["test"]).predictions)
    score_two(out / "final")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a tiny reward model on the pairs in data/.")
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def texts(pairs: Dataset) -> list[str]:
    """All texts in the pairs, to train the tokenizer on."""
    return [message["content"] for row in pairs for column in row.values() for message in column]


def make_trainer(model: str, out: Path, train: Dataset, test: Dataset, options: argparse.Namespace) -> RewardTrainer:
    args = RewardConfig(
        output_dir=str(out),
        num_train_epochs=options.epochs,
        seed=options.seed,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=len(test),  # a single batch, so that predictions are all chosen, then all rejected
        learning_rate=5e-4,
        warmup_steps=20,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=20,
        eval_on_start=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    trainer = RewardTrainer(model=model, args=args, train_dataset=train, eval_dataset=test, callbacks=[Table()])
    trainer.remove_callback(PrinterCallback)
    return trainer


class Table(TrainerCallback):
    """Prints one line per evaluation."""

    def __init__(self):
        self.loss = "-"

    def on_train_begin(self, args, state, control, **kwargs):
        print(f"{'step':>6} {'loss':>9} {'eval loss':>10} {'eval accuracy':>14}")

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.loss = f"{logs['loss']:.4f}"

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        loss, accuracy = metrics["eval_loss"], metrics["eval_accuracy"]
        print(f"{state.global_step:>6} {self.loss:>9} {loss:>10.4f} {accuracy:>14.3f}", flush=True)


def show_curve(history: list[dict], path: Path) -> None:
    losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    accuracies = [(entry["step"], entry["eval_accuracy"]) for entry in history if "eval_accuracy" in entry]
    accuracy = Curve("Accuracy on held-out pairs", accuracies, 0.2, 1.0)
    highest = max(loss for _, loss in losses)
    print(text_plot(accuracy))
    print(f"\nFrom {accuracies[0][1]:.2f} to {accuracies[-1][1]:.2f}. Picture: {path}\n")
    write_svg(path, [accuracy, Curve("Training loss", losses, 0.0, highest, color="#d1242f")])


def scores(folder: Path, conversations: list[list[dict]]) -> np.ndarray:
    """The saved model's score of each conversation, `[rows]`."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    batch = tokenize(tokenizer, conversations)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return np.asarray(logits)[:, 0]


def tokenize(tokenizer: PreTrainedTokenizerBase, conversations: list[list[dict]]) -> dict[str, np.ndarray]:
    rendered = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in conversations]
    return tokenizer(rendered, add_special_tokens=False, padding=True, return_tensors="np")


def check_saved(folder: Path, test: Dataset, predictions: np.ndarray) -> None:
    conversations = [row["prompt"] + row[answer] for answer in ("chosen", "rejected") for row in test]
    gap = float(np.abs(scores(folder, conversations) - np.asarray(predictions)[:, 0]).max())
    if gap > 1e-4:
        raise SystemExit(f"The scores of {folder} differ from the trainer's by {gap:.1e}, expected at most 1e-4.")
    print(f"Loaded {folder} again: {len(conversations)} scores differ from the trainer's by at most {gap:.0e}.\n")


def score_two(folder: Path) -> None:
    question = {"role": "user", "content": QUESTION}
    both = [HELPFUL, DISMISSIVE]
    rewards = scores(folder, [[question, {"role": "assistant", "content": answer}] for answer in both])
    print(QUESTION)
    for reward, answer in zip(rewards, both, strict=True):
        print(f"  {reward:+.2f}  {answer}")


if __name__ == "__main__":
    main()
