"""Which rows a run visits, and when: TRL's order to the index."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from trl_jax.core.torch_random import TorchGenerator


def epoch_order(
    rows: int, *, seed: int, epoch: int, shuffle: bool, lengths: np.ndarray | None = None, group: int = 1
) -> np.ndarray:
    """Row indices of one epoch: `torch.randperm` seeded with `seed + epoch`, or 0, 1, 2, ...; with `lengths`, those of
    like length together, for steps of `group` rows."""
    order = TorchGenerator(seed + epoch).permutation(rows) if shuffle else np.arange(rows)
    return order if lengths is None else grouped_by_length(order, lengths, group)


def grouped_by_length(order: np.ndarray, lengths: np.ndarray, batch_size: int) -> np.ndarray:
    """The same rows, those of like length side by side: transformers' LengthGroupedSampler over this `order`.

    Runs of up to 50 batches, at least four of them, are sorted by length; the longest row of all comes first, so that
    memory that is too small shows at once.
    """
    run = max(1, min(len(order) // (batch_size * 4), 50)) * batch_size
    runs = [sorted(order[i : i + run], key=lambda row: lengths[row], reverse=True) for i in range(0, len(order), run)]
    longest = int(np.argmax([lengths[rows[0]] for rows in runs]))
    runs[0][0], runs[longest][0] = runs[longest][0], runs[0][0]
    return np.concatenate(runs)


def micro_batches(items: Iterator[Any], size: int, *, drop_last: bool) -> Iterator[list]:
    """Runs of `size` items; the last may be shorter, or is left out."""
    items = iter(items)
    while batch := list(islice(items, size)):
        if len(batch) == size or not drop_last:
            yield batch


@dataclass(frozen=True)
class RunLength:
    """How long a run is. A step is an optimizer step; the last one of an epoch may have fewer micro-batches.

    `micro_batches_per_epoch` of a dataset without a length is what `max_steps` asks for.
    """

    max_steps: int
    num_epochs: int
    micro_batches_per_epoch: int


def run_length(
    rows: int | None, *, batch_size: int, accumulation: int, drop_last: bool, epochs: float, max_steps: int
) -> RunLength:
    """The length of a run by TRL's arguments: `max_steps` beats `epochs`; a ragged last step counts as a step.

    Raises:
        ValueError: a dataset without a length and no `max_steps`.
    """
    if rows is None:
        if max_steps <= 0:
            raise ValueError(
                f"train_dataset has no length, so max_steps must say how long to train; it is {max_steps}. "
                "Set max_steps in the config."
            )
        return RunLength(max_steps, sys.maxsize, max_steps * accumulation)
    batches = rows // batch_size if drop_last else math.ceil(rows / batch_size)
    if batches == 0:
        raise ValueError(
            f"dataloader_drop_last=True leaves no batch: {rows} rows, {batch_size} a batch. Lower the batch size."
        )
    steps = math.ceil(batches / accumulation)
    if max_steps > 0:
        return RunLength(max_steps, math.ceil(max_steps / steps), batches)
    return RunLength(math.ceil(epochs * steps), math.ceil(epochs), batches)
