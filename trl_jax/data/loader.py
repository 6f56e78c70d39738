"""Load prepared rows as batches of arrays, one for each optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any, Literal, NamedTuple

import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.data.example import Columns, Example
from trl_jax.data.fingerprint import row_digest
from trl_jax.data.layout.batch import Batch, padded_length
from trl_jax.data.layout.buckets import Buckets, ViewBuckets
from trl_jax.data.layout.packed import Form, RowViewShape, greedy_bins, pack_examples, place
from trl_jax.data.layout.padded import pad_examples
from trl_jax.data.layout.sharded import by_shard, filled, in_shards, packed_passes, room, sharded_rows, shares
from trl_jax.data.order import epoch_order, micro_batches

Weighting = Literal["examples", "tokens", "shards"]


class IndexedExample(NamedTuple):
    """An example, the index of its row in the dataset and, of a stream, the digest up to it."""

    example: Example
    index: int
    digest: int | None


class StepBatch(NamedTuple):
    """The arrays of one optimizer step or one evaluation step, and counts of them.

    num_micro_batches, num_examples, num_tokens: of real ones, without padding.
    num_counted_tokens: of them those of texts that count (`Columns.counted`).
    num_padded_tokens: the same as TRL computes them: each row of a micro-batch as long as its longest.
    num_places: tokens that are computed on here, padding included.
    rows: index of each example's row in the dataset, of a stream in its epoch. passes: those that are in each pass.
    rows_digest: of a stream's examples from the first of the epoch to the last of this batch.
    """

    arrays: Batch
    num_micro_batches: int
    num_examples: int
    num_tokens: int
    num_counted_tokens: int
    num_padded_tokens: int
    num_places: int
    rows: list[int]
    passes: list[list[int]]
    rows_digest: int | None


@dataclass
class ExampleLoader:
    """Iterates over the steps of one epoch, which `set_epoch` chooses.

    `batch_size` examples make a micro-batch, `accumulation` micro-batches a step. In the padded layout a micro-batch is
    a pass; in the packed and shared layouts a step's examples fill as many packed rows, whatever their micro-batch,
    unless `by_micro_batch` keeps those of each together.

    On several devices, `shards` of them divide each micro-batch, and arrays have an axis of shards after that of
    passes. The last micro-batch of a training epoch is then filled up with its first examples, as TRL's ranks do,
    unless `fills` says otherwise: a resumed run goes on as it began, whatever devices it has now.

    The loss of a step is a sum over its examples, whose weights are by `weighting` TRL's mean over micro-batches of
    means over "examples", a mean over "tokens" (the step's targets), or over "shards" of means over each one's targets.
    """

    dataset: Dataset | IterableDataset
    columns: Columns
    example: Callable[[dict[str, Any]], Example]  # makes an example of a row
    batch_size: int
    pad_token_id: int
    pad_to_multiple_of: int | str | None
    layout: str = "padded"
    buckets: Buckets = Buckets()
    weighting: Weighting = "examples"
    views: ViewBuckets | None = None  # instead of buckets, where attention reads the texts of packed rows as rows
    accumulation: int = 1
    by_micro_batch: bool = False
    shards: int = 1
    divided: bool = True  # False: filled up for the shards, but laid out for one device
    fills: bool | None = None  # None: only where there are several shards
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False
    lengths: np.ndarray | None = None  # of the rows, to group rows of like length
    epoch: int = 0
    skipped: int = 0
    skipped_digest: int | None = None

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
            yield self._step(group, number)

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
            yield [IndexedExample(self.example(row), int(i), None) for row, i in zip(values, indices, strict=True)]

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
        fills = self.shards > 1 if self.fills is None else self.fills
        return fills and not self.drop_last

    def _check_skipped(self, digest: int) -> None:
        if self.skipped_digest not in (None, digest):
            raise ValueError(
                f"train_dataset is not the stream that the checkpoint was trained on: its first {self.skipped:,} rows "
                "are others. Pass the same stream, or ignore_data_skip=True to begin the epoch again."
            )

    def _step(self, group: list[list[IndexedExample]], number: int) -> StepBatch:
        shards = self.shards if self.divided else 1
        examples = by_shard([[indexed.example for indexed in batch] for batch in group], shards)
        weights = self._weights(group, examples, shards)
        arrays, pass_of = self._laid_out(examples, weights, partial(self.buckets, step=number))
        if self.by_micro_batch:
            arrays = arrays._replace(share=shares(arrays.weight > 0))
        counted = self.columns.counted
        lengths = [[len(ids) for example in batch for ids in example.texts[:counted]] for batch in examples]
        rows, passes = [indexed.index for batch in group for indexed in batch], self.accumulation * shards
        return StepBatch(
            arrays,
            num_micro_batches=len(group),
            num_examples=sum(map(len, group)),
            num_tokens=sum(example.tokens for batch in examples for example in batch),
            num_counted_tokens=sum(map(sum, lengths)),
            num_padded_tokens=sum(len(texts) * self._trl_length(max(texts)) for texts in lengths if texts),
            num_places=arrays.tokens.size,
            rows=rows,
            passes=[[row for row, at in zip(rows, pass_of, strict=True) if at == p] for p in range(passes)],
            rows_digest=group[-1][-1].digest,
        )

    def _weights(
        self, group: list[list[IndexedExample]], runs: list[list[Example]], shards: int
    ) -> list[float]:
        """The weight of the examples of each of `by_shard`'s runs, by `weighting`."""
        if self.weighting == "examples":
            return [1 / (len(group) * len(batch)) for batch in group for _ in range(shards)]
        targets = np.asarray([sum(example.num_targets for example in run) for run in runs]).reshape(-1, shards)
        if self.weighting == "tokens":
            return [1 / max(1, int(targets.sum()))] * len(runs)
        return (1 / (shards * np.maximum(1, targets.sum(axis=0)))).tolist() * len(group)

    def _laid_out(
        self, micro_batches: list[list[Example]], weights: list[float], bucket: Callable[[int], int]
    ) -> tuple[Batch, list[int]]:
        """The arrays of a step, and for each example the number `pass * shards + shard` of where it is."""
        shards = self.shards if self.divided else 1
        examples, passes = self.batch_size // shards, self.accumulation * shards
        if self.layout == "padded":
            padding = {"pad_token_id": self.pad_token_id, "pad_to_multiple_of": self.pad_to_multiple_of}
            arrays = pad_examples(micro_batches, examples=examples, count=passes, weights=weights, **padding)
            pass_of = [m for m, batch in enumerate(micro_batches) for _ in batch]
            return (arrays if shards == 1 else sharded_rows(arrays, shards)), pass_of
        share = self.layout == "shared"
        placed = place(micro_batches, examples=examples, share=share, weights=weights)
        max_examples = self._max_examples(examples, passes, shards)
        if self.by_micro_batch:
            pass_of = [one.slot // examples for one in placed]
        else:
            pass_of = greedy_bins([one.tokens for one in placed], passes, max_examples)
        view = None if self.views is None else RowViewShape(max_examples, self.views)
        form = Form(self.pad_token_id, share, bucket, view)
        if shards == 1 and not self.by_micro_batch:
            return pack_examples(placed, pass_of, form, examples=examples, count=passes, rows=passes), pass_of
        most = max_examples if self.by_micro_batch else room(examples, self.accumulation)
        sizes = {"examples": examples, "count": self.accumulation, "shards": shards, "most": most}
        arrays = packed_passes(placed, pass_of, form, **sizes)
        return (arrays if shards == 1 else in_shards(arrays, shards)), pass_of

    def _max_examples(self, examples: int, passes: int, shards: int) -> int | None:
        """How many examples a packed row may have; None where that is not bounded."""
        if self.by_micro_batch:
            return examples
        if self.views is not None:
            return examples if passes == 1 else 2 * examples
        return None if shards == 1 else room(examples, self.accumulation)

    def _trl_length(self, longest: int) -> int:
        """The row length of TRL's collator, which has no buckets."""
        return longest if self.pad_to_multiple_of == "auto" else padded_length(longest, self.pad_to_multiple_of)
