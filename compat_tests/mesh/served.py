"""GRPO runs whose completions come from a server, with tools, environments and a `rollout_func`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compat_tests.mesh.tools import FIRST, Shop, add, conversations, words
from compat_tests.parity import reference


def replies(ids: list[int], n: int) -> list[list[int]] | None:
    """The server's replies to conversations: first turns call tools, second turns are derived from the text."""
    text = words().decode(ids)
    if "assistant" not in text:
        return None
    if text.count("assistant") == 1:
        return [words()(turn)["input_ids"] for turn in FIRST[int("You have 1" in text)]][:n]
    return [[ids[(own + place) % len(ids)] for place in range(own + 3)] for own in range(n)]


def twice(prompts: list, trainer: Any) -> dict:
    """A rollout_func that requests a second turn if the first one has an odd number of tokens."""
    ids = [trainer.processing_class.apply_chat_template(prompt, return_dict=False) for prompt in prompts]
    first, logps = trainer._generate_single_turn(ids, None, {}, 2)
    rows = [row for row, own in enumerate(first) if len(own) % 2]
    while rows:  # one at a time
        row = rows.pop()
        [more], [further] = trainer._generate_single_turn([ids[row] + first[row]], None, {}, 1)
        first[row], logps[row] = first[row] + more, logps[row] + further
    return {"prompt_ids": ids, "completion_ids": first, "logprobs": logps}


def run(kind: str, folder: str, out: str, **config: Any) -> reference.Run:
    """The Run's facts are what this process's reward function received, in order."""
    from datasets import Dataset

    import trl_jax

    if kind == "images":
        return with_images(folder, out, **config)

    seen: list = []

    def reward(completions, completion_ids, start, environments=None, **columns):
        seen.extend(zip(start, completions, [list(map(int, own)) for own in completion_ids], strict=True))
        bought = [own.bought for own in environments] if environments else [0] * len(start)
        return [len(ids) % 7 + count / 2 for ids, count in zip(completion_ids, bought, strict=True)]

    given = {"tools": {"tools": [add], "environment_factory": Shop}, "function": {"rollout_func": twice}}[kind]
    config = reference.BASE | {"num_generations": 2, "max_completion_length": 120} | config
    rows = Dataset.from_list(conversations(4))
    args = trl_jax.GRPOConfig(out, **config)
    trainer = trl_jax.GRPOTrainer(folder, reward, args, rows, processing_class=words(), **given)
    trainer.train()
    final = Path(out) / "final"
    trainer.save_model(str(final))
    return reference.Run(trainer.state.log_history, final, reference.read_weights(final), None, facts=seen)


def with_images(folder: str, out: str, **config: Any) -> reference.Run:
    import trl_jax
    from compat_tests.trainer import test_image_rollouts as images

    made = images.trainer(trl_jax, "GRPO", folder, out, **config)
    made.train()
    final = Path(out) / "final"
    made.save_model(str(final))
    return reference.Run(made.state.log_history, final, reference.read_weights(final))
