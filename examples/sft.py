"""Fine-tune a tiny language model on a few chats, and look at its answers before and after. Nothing is downloaded.

    python examples/sft.py [--output_dir out] [--epochs 40] [--seed 42]

The model knows nothing at first: its weights are noise. It is asked for capitals in four ways; of one country in four,
one way is kept back, and answered only by a model that has learned what the question means.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import tiny_model
from datasets import Dataset
from transformers import AutoTokenizer

from trl_jax import AutoModelForCausalLM, SFTConfig, SFTTrainer

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Norway": "Oslo",
    "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Poland": "Warsaw", "Austria": "Vienna",
    "Greece": "Athens", "Egypt": "Cairo", "Kenya": "Nairobi", "Japan": "Tokyo", "Peru": "Lima", "Cuba": "Havana",
}  # fmt: skip
ASKED = [
    "What is the capital of {}?",
    "Which city is the capital of {}?",
    "Name the capital of {}.",
    "Tell me the capital city of {}, please.",
]
ANSWER = "The capital of {} is {}."
MOST_TOKENS = 16


def main() -> None:
    options = read_options()
    out, (train, test) = Path(options.output_dir), chats()
    texts = [message["content"] for row in [*train, *test] for message in row["prompt"] + row["completion"]]
    start = tiny_model.build(out / "start", texts, seed=options.seed)
    trainer = make_trainer(str(start), out, train, test, options)
    before, began = answers(start, test), time.perf_counter()
    trainer.train()
    print(f"Trained on {len(train)} chats in {time.perf_counter() - began:.0f} seconds.\n")
    trainer.save_model(str(out / "final"))
    show(test, before, answers(out / "final", test))
    history = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    first, last = history[0], history[-1]
    print(f"\nOn {len(test)} questions that were kept back, the loss went from {first['eval_loss']:.2f} to ", end="")
    right = [entry["eval_mean_token_accuracy"] for entry in (first, last)]
    print(f"{last['eval_loss']:.2f}, and tokens that are right from {right[0]:.2f} to {right[1]:.2f}. ", end="")
    print(f"The model is in {out / 'final'}.")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a tiny language model on a few chats.")
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--epochs", type=float, default=40)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def chats() -> tuple[list[dict], list[dict]]:
    """Chats to train on, and those that are kept back: every fourth country in one of the ways to ask."""
    train, test = [], []
    for number, (country, city) in enumerate(CAPITALS.items()):
        for way, question in enumerate(ASKED):
            asked = [{"role": "user", "content": question.format(country)}]
            answered = [{"role": "assistant", "content": ANSWER.format(country, city)}]
            held_back = number % 4 == 0 and way == number // 4
            (test if held_back else train).append({"prompt": asked, "completion": answered})
    return train, test


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


def answers(folder: Path, rows: list[dict]) -> list[str]:
    """The answer of a saved model to the prompt of each row: the likeliest token, again and again, until it ends."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    texts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"] for row in rows
    ]
    starts = [len(ids) for ids in texts]
    for _ in range(MOST_TOKENS):
        tokens = tokenizer.pad({"input_ids": texts}, padding_side="right", return_tensors="np")
        logits = np.asarray(model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).logits)
        for row, ids in zip(logits, texts, strict=True):
            if ids[-1] != tokenizer.eos_token_id:
                ids.append(int(np.argmax(row[len(ids) - 1])))
    said = [ids[start:] for ids, start in zip(texts, starts, strict=True)]
    return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in said]


def show(rows: list[dict], before: list[str], after: list[str]) -> None:
    for row, first, last in zip(rows, before, after, strict=True):
        print(f"{row['prompt'][0]['content']}\n  before: {first[:60] or '(nothing)'}\n  after:  {last}")
    right = sum(
        row["completion"][0]["content"].lower() == answer.lower() for row, answer in zip(rows, after, strict=True)
    )
    print(f"\n{right} of {len(rows)} answers are right.")


if __name__ == "__main__":
    main()
