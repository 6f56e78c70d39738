"""Load prepared rows as batches of arrays, one for each optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.data.example import Columns, Example
from trl_jax.data.fingerprint import row_digest
from trl_jax.data.layout.sharded import filled
from trl_jax.data.order import epoch_order, micro_batches
from trl_jax.data.step_layout import IndexedExample, StepBatch, StepLayout


@dataclass
class ExampleLoader:
    """Iterates over the steps of one epoch, which `set_epoch` chooses: the order of a dataset's rows.

    On several devices the last micro-batch of a training epoch is filled up with its first examples, as TRL's ranks do,
    unless `fill_last` says otherwise: a resumed run goes on as it began, whatever devices it has now.
    """

    dataset: Dataset | IterableDataset
    columns: Columns
    example: Callable[[dict[str, Any]], Example]  # makes an example of a row
    step_layout: StepLayout
    fill_last: bool | None = None  # None: only where there are several shards
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False
    lengths: np.ndarray | None = None  # of the rows, to group rows of like length
    epoch: int = 0
    skipped: int = 0
    skipped_digest: int | None = None

    @property
    def batch_size(self) -> int:
        """Examples of a micro-batch."""
        return self.step_layout.batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return self.step_layout.accumulation

    def laid_out(self, **changes: Any) -> ExampleLoader:
        """The same examples, with these fields of the layout changed."""
        return replace(self, step_layout=replace(self.step_layout, **changes))

    def set_epoch(self, epoch: int, skip: int = 0, skipped_digest: int | None = None) -> None:
        """Let the next iteration run through this epoch's order, without its first `skip` examples.

        A stream is read from its beginning nevertheless, so that a shuffled one has the same order. Iterating raises
        ValueError where its skipped examples have another digest than `skipped_digest`.
        """
        self.epoch, self.skipped, self.skipped_digest = epoch, skip, skipped_digest
        if isinstance(self.dataset, IterableDataset):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Steps in an epoch; TypeError where the dataset has no length."""
        rows = len(self.dataset)
        batches = rows // self.batch_size if self.drop_last else math.ceil(rows / self.batch_size)
        return math.ceil(batches / self.accumulation)

    def __iter__(self) -> Iterator[StepBatch]:
        first = 0 if isinstance(self.dataset, IterableDataset) else self._steps_before()
        for number, group in enumerate(self.groups(), start=first):
            yield self.step_layout.step(group, number)

    def _steps_before(self) -> int:
        """Number of steps of the run before the first of the next iteration."""
        return self.epoch * len(self) + self.skipped // (self.batch_size * self.accumulation)

    def groups(self) -> Iterator[list[list[IndexedExample]]]:
        """Iterate over steps: their examples, by micro-batch."""
        return micro_batches(self._micro_batches(), self.accumulation, drop_last=False)

    def _micro_batches(self) -> Iterator[list[IndexedExample]]:
        if isinstance(self.dataset, IterableDataset):
            yield from micro_batches(self._stream(), self.batch_size, drop_last=self.drop_last)
            return
        columns = self.dataset.select_columns([name for name in self.columns.all if name in self.dataset.column_names])
        order = epoch_order(
            len(columns),
            seed=self.seed,
            epoch=self.epoch,
            shuffle=self.shuffle,
            lengths=self.lengths,
            group=self.batch_size * self.accumulation,
        )
        if self._filling:
            order = filled(order, self.batch_size)
        for indices in micro_batches(order[self.skipped :], self.batch_size, drop_last=self.drop_last):
            rows = columns[np.asarray(indices)]
            values = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
            yield [IndexedExample(self.example(row), int(i)) for row, i in zip(values, indices, strict=True)]

    def _stream(self) -> Iterator[IndexedExample]:
        read, digest, first = 0, 0, []
        for row in self.dataset:
            digest = row_digest(row, self.columns, digest)
            if read < self.batch_size:
                first.append(IndexedExample(self.example(row), read, digest))
            if read >= self.skipped:
                yield IndexedExample(self.example(row), read, digest)
            read += 1
            if read == self.skipped:
                self._check_skipped(digest)
        if read < self.skipped:
            self._check_skipped(digest)
        missing = -read % self.batch_size if self._filling and read else 0
        for indexed in islice(cycle(first), max(0, self.skipped - read), missing):
            yield indexed._replace(digest=digest)

    @property
    def _filling(self) -> bool:
        fill_last = self.step_layout.shards > 1 if self.fill_last is None else self.fill_last
        return fill_last and not self.drop_last

    def _check_skipped(self, digest: int) -> None:
        if self.skipped_digest not in (None, digest):
            raise ValueError(
                f"train_dataset is not the stream that the checkpoint was trained on: its first {self.skipped:,} rows "
                "are others. Pass the same stream, or ignore_data_skip=True to begin the epoch again."
            )
