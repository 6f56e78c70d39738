"""Prepared rows in, batches of arrays out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.data.layout import PairBatch, pad_pairs, padded_length
from trl_jax.data.order import epoch_order, micro_batches

COLUMNS = ("chosen_ids", "rejected_ids", "margin")


class StepBatch(NamedTuple):
    """What one optimizer step, or one evaluation step, is computed on.

    num_micro_batches counts the real ones; num_pairs and num_tokens count real pairs and tokens, pads left out.
    num_padded_tokens is what TRL would have computed on: every row of a micro-batch as long as its longest.
    """

    arrays: PairBatch
    num_micro_batches: int
    num_pairs: int
    num_tokens: int
    num_padded_tokens: int


@dataclass
class PreferenceLoader:
    """Iterates over the steps of one epoch; `set_epoch` chooses which.

    `batch_size` pairs make a micro-batch, `accumulation` micro-batches a step.
    """

    dataset: Dataset | IterableDataset
    batch_size: int
    pad_token_id: int
    pad_to_multiple_of: int | str | None
    accumulation: int = 1
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """The next iteration runs through this epoch's order."""
        self.epoch = epoch
        if isinstance(self.dataset, IterableDataset):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Steps in an epoch; TypeError where the dataset has no length, as len() of it would raise."""
        rows = len(self.dataset)
        batches = rows // self.batch_size if self.drop_last else math.ceil(rows / self.batch_size)
        return math.ceil(batches / self.accumulation)

    def __iter__(self) -> Iterator[StepBatch]:
        for group in micro_batches(self._micro_batches(), self.accumulation, drop_last=False):
            yield self._step(group)

    def _micro_batches(self) -> Iterator[list[dict]]:
        if isinstance(self.dataset, IterableDataset):
            yield from micro_batches(iter(self.dataset), self.batch_size, drop_last=self.drop_last)
            return
        columns = self.dataset.select_columns([name for name in COLUMNS if name in self.dataset.column_names])
        order = epoch_order(len(columns), seed=self.seed, epoch=self.epoch, shuffle=self.shuffle)
        for indices in micro_batches(order, self.batch_size, drop_last=self.drop_last):
            rows = columns[np.asarray(indices)]
            yield [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]

    def _step(self, group: list[list[dict]]) -> StepBatch:
        arrays = pad_pairs(
            group,
            pairs=self.batch_size,
            count=self.accumulation,
            pad_token_id=self.pad_token_id,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )
        lengths = [[len(row[side]) for row in rows for side in COLUMNS[:2]] for rows in group]
        return StepBatch(
            arrays,
            num_micro_batches=len(group),
            num_pairs=sum(map(len, group)),
            num_tokens=sum(map(sum, lengths)),
            num_padded_tokens=sum(len(rows) * self._trl_length(max(rows)) for rows in lengths),
        )

    def _trl_length(self, longest: int) -> int:
        """The row length of TRL's collator, which knows no ladder."""
        return longest if self.pad_to_multiple_of == "auto" else padded_length(longest, self.pad_to_multiple_of)
