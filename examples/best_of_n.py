"""Best-of-n sampling: a reward model picks the best of n answers. Nothing is downloaded.

    python examples/best_of_n.py [--output_dir out] [--policy out/fine-tuned] [--n 16] [--seed 42]

A tiny language model is fine-tuned to answer with three digits in random order, as in grpo.py. A reward model learns
from preference pairs that sorted digits are better. Then n answers to each question are sampled, and the one with the
highest reward is kept. The language model itself does not change.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import numpy as np
from datasets import Dataset
from grpo import COMMON, DIGITS, MOST_TOKENS, fine_tuned, is_sorted, questions
from transformers import AutoTokenizer, PrinterCallback

from trl_jax import AutoModelForCausalLM, PreTrainedModel, RewardConfig, RewardTrainer


def main() -> None:
    options = read_options()
    out, began = Path(options.output_dir), time.perf_counter()
    train, test = questions()
    policy = Path(options.policy) if options.policy else fine_tuned(train, out, options.seed)
    judge = reward_model(policy, train, out, options.seed)
    print(f"Trained in {time.perf_counter() - began:.0f} seconds.\n")

    tokenizer = AutoTokenizer.from_pretrained(policy, trust_remote_code=False)
    prompts = [row["prompt"] for row in test] * 8
    sampling = {"max_new_tokens": MOST_TOKENS, "do_sample": True, "top_k": 0, "num_return_sequences": options.n}
    model = AutoModelForCausalLM.from_pretrained(policy)
    completions = model.generate_text(prompts, tokenizer, seed=options.seed, **sampling)
    best = []
    for prompt, answers in zip(prompts, completions, strict=True):
        scores = scored(judge, tokenizer, prompt, answers)
        best.append(answers[int(scores.argmax())])
    for prompt, answers, answer in list(zip(prompts, completions, best, strict=True))[: len(test)]:
        print(f"{prompt[0]['content']:<24} first: {answers[0].strip():<10} best of {options.n}: {answer.strip()}")
    first, last = share_of_sorted([answers[0] for answers in completions]), share_of_sorted(best)
    print(f"\nThe share of correct answers went from {first:.2f} to {last:.2f}.")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Best-of-n sampling with a reward model.")
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--policy", help="model that grpo.py saved in out/fine-tuned (default: train it)")
    parser.add_argument("--n", type=int, default=16, help="answers per question")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def reward_model(start: Path, train: list[dict], out: Path, seed: int) -> PreTrainedModel:
    """Train a reward model, initialized from the policy, to prefer sorted digits.

    The rejected answers have the same digits in a different order, or one digit twice.
    """
    pick = random.Random(seed)
    rows = []
    for row in train * 60:
        digits = pick.sample(DIGITS, 3)
        right = first, second, third = sorted(digits)
        twice = [first, first, third] if pick.random() < 0.5 else [first, second, second]
        if (wrong := pick.choice([digits, digits[::-1], twice])) != right:
            rows.append(row | {"chosen": said(" ".join(right)), "rejected": said(" ".join(wrong))})
    args = RewardConfig(
        str(out), num_train_epochs=6, seed=seed, learning_rate=3e-3, warmup_steps=10, per_device_train_batch_size=16,
        **COMMON,
    )  # fmt: skip
    trainer = RewardTrainer(model=str(start), args=args, train_dataset=Dataset.from_list(rows))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(str(out / "judge"))
    return trainer.model


def said(answer: str) -> list[dict]:
    return [{"role": "assistant", "content": answer}]


def scored(judge: PreTrainedModel, tokenizer, prompt: list[dict], answers: list[str]) -> np.ndarray:
    """The reward of each answer to a prompt."""
    conversations = [prompt + said(answer.strip()) for answer in answers]
    options = {"tokenize": True, "return_dict": True, "padding": True, "return_tensors": "np"}
    rows = tokenizer.apply_chat_template(conversations, **options)
    return np.asarray(judge(rows["input_ids"], rows["attention_mask"]).logits[:, 0])


def share_of_sorted(answers: list[str]) -> float:
    return float(np.mean(is_sorted([said(answer) for answer in answers])))


if __name__ == "__main__":
    main()
