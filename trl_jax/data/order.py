"""The order in which a run reads its rows, the same as TRL's to the index, and the length of a run."""

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
    """Row indices of one epoch, `[rows]`: `torch.randperm` seeded with `seed + epoch`, or 0, 1, 2, ... without
    `shuffle`.

    Args:
        lengths: of the rows; where given, rows of like length are grouped into steps of `group` rows.
    """
    order = TorchGenerator(seed + epoch).permutation(rows) if shuffle else np.arange(rows)
    return order if lengths is None else grouped_by_length(order, lengths, group)


def grouped_by_length(order: np.ndarray, lengths: np.ndarray, batch_size: int) -> np.ndarray:
    """Put rows of like length next to each other: transformers' LengthGroupedSampler, over this `order`.

    Stretches of up to 50 batches, at least four of them, are sorted by length. The longest row of all comes first, so
    that a step that does not fit into memory fails at once.
    """
    run = max(1, min(len(order) // (batch_size * 4), 50)) * batch_size
    runs = [sorted(order[i : i + run], key=lambda row: lengths[row], reverse=True) for i in range(0, len(order), run)]
    longest = int(np.argmax([lengths[rows[0]] for rows in runs]))
    runs[0][0], runs[longest][0] = runs[longest][0], runs[0][0]
    return np.concatenate(runs)


def micro_batches(items: Iterator[Any], size: int, *, drop_last: bool) -> Iterator[list]:
    """Group items by `size`; the last group may be shorter, or is left out with `drop_last`."""
    items = iter(items)
    while batch := list(islice(items, size)):
        if len(batch) == size or not drop_last:
            yield batch


@dataclass(frozen=True)
class RunLength:
    """The length of a run in optimizer steps; the last step of an epoch may have fewer micro-batches.

    micro_batches_per_epoch: for a dataset without a length, as many as `max_steps` needs.
    """

    max_steps: int
    num_epochs: int
    micro_batches_per_epoch: int


def run_length(
    rows: int | None, *, batch_size: int, accumulation: int, drop_last: bool, epochs: float, max_steps: int
) -> RunLength:
    """The length of a run by TRL's arguments: `max_steps` beats `epochs`; an incomplete last step counts.

    Raises:
        ValueError: the dataset has no length and there is no `max_steps`, or `drop_last` leaves no batch.
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
