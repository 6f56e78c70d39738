"""Shared by the language model examples: chats about capitals, and the answers of a saved model."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from trl_jax import AutoModelForCausalLM  # before transformers, as in tiny_model.py

# isort: split

from transformers import AutoTokenizer

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


def read_options(description: str, epochs: float) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--epochs", type=float, default=epochs)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def chats() -> tuple[list[dict], list[dict]]:
    """Chats for training, and held-out ones: one of the questions for every fourth country."""
    train, test = [], []
    for number, (country, city) in enumerate(CAPITALS.items()):
        for kind, question in enumerate(ASKED):
            prompt = [{"role": "user", "content": question.format(country)}]
            completion = [{"role": "assistant", "content": ANSWER.format(country, city)}]
            held_back = number % 4 == 0 and kind == number // 4
            (test if held_back else train).append({"prompt": prompt, "completion": completion})
    return train, test


def texts(rows: list[dict]) -> list[str]:
    """All texts in the rows, to train the tokenizer on."""
    return [message["content"] for row in rows for messages in row.values() for message in messages]


def answers(folder: Path, rows: list[dict]) -> list[str]:
    """The greedy answers of a saved model to the prompts of the rows."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"] for row in rows]
    starts = [len(ids) for ids in texts]
    for _ in range(MOST_TOKENS):
        tokens = tokenizer.pad({"input_ids": texts}, padding_side="right", return_tensors="np")
        logits = np.asarray(model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).logits)
        for row, ids in zip(logits, texts, strict=True):
            if ids[-1] != tokenizer.eos_token_id:
                ids.append(int(np.argmax(row[len(ids) - 1])))
    completions = [ids[start:] for ids, start in zip(texts, starts, strict=True)]
    return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in completions]


def show(rows: list[dict], column: str, before: list[str], after: list[str]) -> None:
    """Print the answers before and after training, and how many of those after training match the column."""
    for row, first, last in zip(rows, before, after, strict=True):
        print(f"{row['prompt'][0]['content']}\n  before: {first[:60] or '(nothing)'}\n  after:  {last}")
    right = sum(row[column][0]["content"].lower() == answer.lower() for row, answer in zip(rows, after, strict=True))
    print(f"\n{right} of {len(rows)} answers are correct.")
