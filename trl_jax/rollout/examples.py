"""Completions as the examples of a step, with the numbers that the loss needs of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trl_jax.core.virtual_tokens import NONE, VirtualTokens
from trl_jax.data.example import IGNORED, Context, Example
from trl_jax.data.extras import Extras
from trl_jax.data.layout.sharded import by_shard
from trl_jax.rollout.experience import Completed, Experience
from trl_jax.tasks.rollout import RolloutTask


def example_of(
    prompt: Sequence[int],
    completion: Sequence[int],
    completion_mask: np.ndarray,
    numbers: Mapping[str, float] | None = None,
    of_tokens: Mapping[str, np.ndarray] | None = None,
) -> Example:
    """A prompt with its completion as one text, of which the tokens of the completion that count are predicted. Other
    completions of the prompt may share it.

    Args:
        completion_mask: bool, of each token of the completion.
        numbers: of the completion. of_tokens: of its tokens that count.
    """
    ids = np.concatenate([prompt, completion]).astype(np.int32)
    labels = np.full(len(ids), IGNORED, np.int32)
    labels[len(prompt) :][completion_mask] = np.asarray(completion)[completion_mask]
    extras = Extras(dict(numbers or {}), {}, {name: (values,) for name, values in (of_tokens or {}).items()})
    return Example((ids,), extras, (labels,), context=Context(ids[: len(prompt)].tobytes(), len(prompt)))


def step_examples(
    task: RolloutTask,
    parts: Sequence[Sequence[Completed]],
    generations: Sequence[Experience],
    part: float,
    ranks: int,
    numbers: Mapping[str, float],
    virtual: VirtualTokens = NONE,
) -> list[list[Example]]:
    """The examples of a step's micro-batches.

    Args:
        generations: the one that each micro-batch is cut from.
        part: micro-batches of the step / micro-batches of a generation.
        ranks: that a micro-batch is divided over.
        numbers: which all completions have alike.
        virtual: the tokens that stand before each text.
    """
    groups = []
    for rows, generation in zip(parts, generations, strict=True):
        lengths = np.asarray([row.num_tokens for row in rows], np.float32)
        completion_weight = np.full(len(rows), 1 / (len(parts) * len(rows)), np.float32)
        member = np.zeros((ranks, len(rows)), bool)
        for rank, own in enumerate(by_shard([range(len(rows))], ranks)):
            member[rank, own] = True
        tokens = generation.num_tokens
        weights = task.token_weights(lengths, completion_weight, member, generated_tokens=tokens, part=part)
        made = [_with_numbers(task, *row, numbers) for row in zip(rows, weights.tolist(), strict=True)]
        groups.append([example.behind(virtual, predicted=False) for example in made])
    return groups


def _with_numbers(task: RolloutTask, row: Completed, weight: float, numbers: Mapping[str, float]) -> Example:
    own, of_tokens = task.numbers(row)
    numbers = {**own, "token_weight": weight, **numbers}
    return example_of(row.prompt, row.completion, row.completion_mask, numbers, of_tokens)
