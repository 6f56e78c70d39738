"""Prepared rows in, batches of arrays out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.data.fingerprint import row_digest
from trl_jax.data.layout.batch import PairBatch, pad_pairs, padded_length
from trl_jax.data.layout.packed import Form, Rows, greedy_bins, place, stream_pairs
from trl_jax.data.layout.plan import Buckets, Shapes
from trl_jax.data.layout.sharded import by_shard, filled, room, sharded_rows, sharded_streams
from trl_jax.data.order import epoch_order, micro_batches

COLUMNS = ("chosen_ids", "rejected_ids", "margin")


class Place(NamedTuple):
    """A pair, where it stands in the dataset, and the digest of a stream up to it."""

    row: dict
    index: int
    digest: int | None


class StepBatch(NamedTuple):
    """What one optimizer step, or one evaluation step, is computed on.

    num_micro_batches counts the real ones; num_pairs and num_tokens count real pairs and tokens, pads left out.
    num_padded_tokens is what TRL would have computed on: every row of a micro-batch as long as its longest.
    num_places is what is computed on here. rows are the pairs' places in the dataset, of a stream in its epoch;
    passes says which of these are in each pass. rows_digest is that of a stream's pairs from the epoch's first to this
    batch's last.
    """

    arrays: PairBatch
    num_micro_batches: int
    num_pairs: int
    num_tokens: int
    num_padded_tokens: int
    num_places: int
    rows: list[int]
    passes: list[list[int]]
    rows_digest: int | None


@dataclass
class PreferenceLoader:
    """Iterates over the steps of one epoch; `set_epoch` chooses which.

    `batch_size` pairs make a micro-batch, `accumulation` micro-batches a step. Padded, a micro-batch is a pass; packed
    or shared, a step's pairs are dealt to as many streams, whichever their micro-batch.

    On several devices `shards` of them share each micro-batch, and arrays have an axis for them behind that of passes.
    As TRL's ranks do, an epoch of training then begins again at its end until its last micro-batch is whole, unless
    `fills` says otherwise: a run goes on as it began, whichever devices it has now.
    """

    dataset: Dataset | IterableDataset
    batch_size: int
    pad_token_id: int
    pad_to_multiple_of: int | str | None
    layout: str = "padded"
    buckets: Buckets = Buckets()
    shapes: Shapes | None = None  # in place of the ladder where texts in streams stand as rows, too
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
        """The next iteration runs through this epoch's order, without its first `skip` pairs.

        A stream is read to there all the same: only so does a shuffled one come out as it was. Where its pairs do not
        have `skipped_digest`, the iteration raises ValueError.
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

    def groups(self) -> Iterator[list[list[Place]]]:
        """The pairs of each step, by micro-batch."""
        return micro_batches(self._micro_batches(), self.accumulation, drop_last=False)

    def _micro_batches(self) -> Iterator[list[Place]]:
        if isinstance(self.dataset, IterableDataset):
            yield from micro_batches(self._stream(), self.batch_size, drop_last=self.drop_last)
            return
        columns = self.dataset.select_columns([name for name in COLUMNS if name in self.dataset.column_names])
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
            yield [Place(row, int(index), None) for row, index in zip(values, indices, strict=True)]

    def _stream(self) -> Iterator[Place]:
        read, digest, first = 0, 0, []
        for row in self.dataset:
            digest = row_digest(row, digest)
            if read < self.batch_size:
                first.append(Place(row, read, digest))
            if read >= self.skipped:
                yield Place(row, read, digest)
            read += 1
            if read == self.skipped:
                self._check_skipped(digest)
        if read < self.skipped:
            self._check_skipped(digest)
        missing = -read % self.batch_size if self._filling and read else 0
        for place_ in islice(cycle(first), max(0, self.skipped - read), missing):
            yield place_._replace(digest=digest)

    @property
    def _filling(self) -> bool:
        fills = self.shards > 1 if self.fills is None else self.fills
        return fills and not self.drop_last

    def _check_skipped(self, digest: int) -> None:
        if self.skipped_digest not in (None, digest):
            raise ValueError(
                f"train_dataset is not the stream that the checkpoint was trained on: its first {self.skipped:,} pairs "
                "are others. Pass the same stream, or ignore_data_skip=True to begin the epoch again."
            )

    def _step(self, group: list[list[Place]], number: int) -> StepBatch:
        shards = self.shards if self.divided else 1
        pairs = by_shard([[place.row for place in places] for places in group], shards)
        weights = [1 / (len(group) * len(places)) for places in group for _ in range(shards)]
        arrays, into = self._laid_out(pairs, weights, partial(self.buckets, step=number))
        lengths = [[len(row[side]) for row in rows for side in COLUMNS[:2]] for rows in pairs]
        rows, passes = [place.index for places in group for place in places], self.accumulation * shards
        return StepBatch(
            arrays,
            num_micro_batches=len(group),
            num_pairs=sum(map(len, group)),
            num_tokens=sum(map(sum, lengths)),
            num_padded_tokens=sum(len(rows) * self._trl_length(max(rows)) for rows in lengths if rows),
            num_places=arrays.tokens.size,
            rows=rows,
            passes=[[row for row, own in zip(rows, into, strict=True) if own == p] for p in range(passes)],
            rows_digest=group[-1][-1].digest,
        )

    def _laid_out(
        self, micro_batches: list[list[dict]], weights: list[float], bucket: Callable[[int], int]
    ) -> tuple[PairBatch, list[int]]:
        """The arrays of a step, and for each pair the pass, and shard, that it is in: counted over both."""
        shards = self.shards if self.divided else 1
        pairs, passes = self.batch_size // shards, self.accumulation * shards
        if self.layout == "padded":
            how = {"pad_token_id": self.pad_token_id, "pad_to_multiple_of": self.pad_to_multiple_of}
            arrays = pad_pairs(micro_batches, pairs=pairs, count=passes, weights=weights, **how)
            into = [m for m, rows in enumerate(micro_batches) for _ in rows]
            return (arrays if shards == 1 else sharded_rows(arrays, shards)), into
        share = self.layout == "shared"
        placed = place(micro_batches, pairs=pairs, share=share, weights=weights)
        most = None if shards == 1 else room(pairs, self.accumulation)
        if self.shapes is not None:
            most = pairs if passes == 1 else 2 * pairs
        into = greedy_bins([pair.tokens for pair in placed], passes, most)
        form = Form(self.pad_token_id, share, bucket, None if self.shapes is None else Rows(most, self.shapes))
        if shards == 1:
            return stream_pairs(placed, into, form, pairs=pairs, count=passes, streams=passes), into
        return sharded_streams(placed, into, form, pairs=pairs, count=self.accumulation, shards=shards), into

    def _trl_length(self, longest: int) -> int:
        """The row length of TRL's collator, which knows no ladder."""
        return longest if self.pad_to_multiple_of == "auto" else padded_length(longest, self.pad_to_multiple_of)
