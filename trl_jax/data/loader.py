"""Prepared rows in, batches of arrays out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.data.example import Columns, Example
from trl_jax.data.fingerprint import row_digest
from trl_jax.data.layout.batch import Batch, padded_length
from trl_jax.data.layout.buckets import Buckets, ViewBuckets
from trl_jax.data.layout.packed import Form, RowViewShape, greedy_bins, pack_examples, place
from trl_jax.data.layout.padded import pad_examples
from trl_jax.data.layout.sharded import by_shard, filled, room, sharded_packed, sharded_rows
from trl_jax.data.order import epoch_order, micro_batches


class Visited(NamedTuple):
    """An example, where its row stands in the dataset, and the digest of a stream up to it."""

    example: Example
    index: int
    digest: int | None


class StepBatch(NamedTuple):
    """The arrays of one optimizer step, or of one evaluation step, and what there is to say of them.

    num_micro_batches counts the real ones; num_examples and num_tokens count real examples and tokens, pads left out.
    num_padded_tokens is what TRL would have computed on: every row of a micro-batch as long as its longest.
    num_places is what is computed on here. rows are the examples' places in the dataset, of a stream in its epoch;
    passes says which of these are in each pass. rows_digest is that of a stream's examples from the epoch's first to
    this batch's last.
    """

    arrays: Batch
    num_micro_batches: int
    num_examples: int
    num_tokens: int
    num_padded_tokens: int
    num_places: int
    rows: list[int]
    passes: list[list[int]]
    rows_digest: int | None


@dataclass
class ExampleLoader:
    """Iterates over the steps of one epoch; `set_epoch` chooses which.

    `batch_size` examples make a micro-batch, `accumulation` micro-batches a step. Padded, a micro-batch is a pass;
    packed or shared, a step's examples go into as many packed rows, whichever their micro-batch.

    On several devices `shards` of them share each micro-batch, and arrays have an axis for them behind that of passes.
    As TRL's ranks do, an epoch of training then begins again at its end until its last micro-batch is whole, unless
    `fills` says otherwise: a run goes on as it began, whichever devices it has now.
    """

    dataset: Dataset | IterableDataset
    columns: Columns
    example: Callable[[dict[str, Any]], Example]  # of a row
    batch_size: int
    pad_token_id: int
    pad_to_multiple_of: int | str | None
    layout: str = "padded"
    buckets: Buckets = Buckets()
    views: ViewBuckets | None = None  # in place of the buckets where texts in packed rows are viewed as rows, too
    accumulation: int = 1
    shards: int = 1
    divided: bool = True  # False: filled up for the shards, but laid out as for one device
    fills: bool | None = None  # None: where there are several shards
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False
    lengths: np.ndarray | None = None  # of the rows, to visit those of like length together
    epoch: int = 0
    skipped: int = 0
    skipped_digest: int | None = None

    def set_epoch(self, epoch: int, skip: int = 0, skipped_digest: int | None = None) -> None:
        """Have the next iteration run through this epoch's order, without its first `skip` examples.

        A stream is read to there all the same: only so does a shuffled one come out as it was. Where its examples do
        not have `skipped_digest`, the iteration raises ValueError.
        """
        self.epoch, self.skipped, self.skipped_digest = epoch, skip, skipped_digest
        if isinstance(self.dataset, IterableDataset):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Steps in an epoch; TypeError where the dataset has no length, as len() of it would raise."""
        rows = len(self.dataset)
        batches = rows // self.batch_size if self.drop_last else math.ceil(rows / self.batch_size)
        return math.ceil(batches / self.accumulation)

    def __iter__(self) -> Iterator[StepBatch]:
        first = 0 if isinstance(self.dataset, IterableDataset) else self._steps_before()
        for number, group in enumerate(self.groups(), start=first):
            yield self._step(group, number)

    def _steps_before(self) -> int:
        """Steps of the run before the next iteration's first."""
        return self.epoch * len(self) + self.skipped // (self.batch_size * self.accumulation)

    def groups(self) -> Iterator[list[list[Visited]]]:
        """The examples of each step, by micro-batch."""
        return micro_batches(self._micro_batches(), self.accumulation, drop_last=False)

    def _micro_batches(self) -> Iterator[list[Visited]]:
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
            yield [Visited(self.example(row), int(i), None) for row, i in zip(values, indices, strict=True)]

    def _stream(self) -> Iterator[Visited]:
        read, digest, first = 0, 0, []
        for row in self.dataset:
            digest = row_digest(row, self.columns, digest)
            if read < self.batch_size:
                first.append(Visited(self.example(row), read, digest))
            if read >= self.skipped:
                yield Visited(self.example(row), read, digest)
            read += 1
            if read == self.skipped:
                self._check_skipped(digest)
        if read < self.skipped:
            self._check_skipped(digest)
        missing = -read % self.batch_size if self._filling and read else 0
        for visited in islice(cycle(first), max(0, self.skipped - read), missing):
            yield visited._replace(digest=digest)

    @property
    def _filling(self) -> bool:
        fills = self.shards > 1 if self.fills is None else self.fills
        return fills and not self.drop_last

    def _check_skipped(self, digest: int) -> None:
        if self.skipped_digest not in (None, digest):
            raise ValueError(
                f"train_dataset is not the stream that the checkpoint was trained on: its first {self.skipped:,} rows "
                "are others. Pass the same stream, or ignore_data_skip=True to begin the epoch again."
            )

    def _step(self, group: list[list[Visited]], number: int) -> StepBatch:
        shards = self.shards if self.divided else 1
        examples = by_shard([[visited.example for visited in batch] for batch in group], shards)
        weights = [1 / (len(group) * len(batch)) for batch in group for _ in range(shards)]
        arrays, into = self._laid_out(examples, weights, partial(self.buckets, step=number))
        lengths = [[len(ids) for example in own for ids in example.texts] for own in examples]
        rows, passes = [visited.index for batch in group for visited in batch], self.accumulation * shards
        return StepBatch(
            arrays,
            num_micro_batches=len(group),
            num_examples=sum(map(len, group)),
            num_tokens=sum(map(sum, lengths)),
            num_padded_tokens=sum(len(own) * self._trl_length(max(own)) for own in lengths if own),
            num_places=arrays.tokens.size,
            rows=rows,
            passes=[[row for row, own in zip(rows, into, strict=True) if own == p] for p in range(passes)],
            rows_digest=group[-1][-1].digest,
        )

    def _laid_out(
        self, micro_batches: list[list[Example]], weights: list[float], bucket: Callable[[int], int]
    ) -> tuple[Batch, list[int]]:
        """The arrays of a step, and for each example the pass, and shard, that it is in: counted over both."""
        shards = self.shards if self.divided else 1
        examples, passes = self.batch_size // shards, self.accumulation * shards
        if self.layout == "padded":
            padding = {"pad_token_id": self.pad_token_id, "pad_to_multiple_of": self.pad_to_multiple_of}
            arrays = pad_examples(micro_batches, examples=examples, count=passes, weights=weights, **padding)
            into = [m for m, batch in enumerate(micro_batches) for _ in batch]
            return (arrays if shards == 1 else sharded_rows(arrays, shards)), into
        share = self.layout == "shared"
        placed = place(micro_batches, examples=examples, share=share, weights=weights)
        most = None if shards == 1 else room(examples, self.accumulation)
        if self.views is not None:
            most = examples if passes == 1 else 2 * examples
        into = greedy_bins([one.tokens for one in placed], passes, most)
        view = None if self.views is None else RowViewShape(most, self.views)
        form = Form(self.pad_token_id, share, bucket, view)
        if shards == 1:
            return pack_examples(placed, into, form, examples=examples, count=passes, rows=passes), into
        return sharded_packed(placed, into, form, examples=examples, count=self.accumulation, shards=shards), into

    def _trl_length(self, longest: int) -> int:
        """The row length of TRL's collator, which knows no buckets."""
        return longest if self.pad_to_multiple_of == "auto" else padded_length(longest, self.pad_to_multiple_of)
