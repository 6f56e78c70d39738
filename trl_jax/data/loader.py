"""Load prepared rows as batches, one per optimizer step or evaluation chunk. Pure NumPy."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, groupby, islice
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash
from datasets import Dataset, Image, IterableDataset, List

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.data.batch import Batch, Columns, Example, LossBatch, loss_batch, padded_length, rows_of
from trl_jax.data.checks import blocks, has_transform
from trl_jax.data.layout_plan import Buckets, ViewBuckets
from trl_jax.data.packed import (
    PackingSpec,
    Placed,
    RowViewShape,
    assign_rows,
    by_shard,
    filled,
    fullest_row,
    in_shards,
    longest_in_batch,
    pack_examples,
    pad_examples,
    pass_weights,
    place,
    room,
    row_slots,
    sharded_rows,
    step_slots,
)

CHUNK_BATCHES = 64  # batches per evaluation chunk
Weighting = Literal["examples", "tokens", "micro_batches", "shards"]


# Evaluation chunks: examples are sorted by length within a chunk, and outputs are restored to the original order.


@dataclass
class EvalChunk:
    """A number of batches, and the passes that compute the outputs of their examples.

    passes: for each pass its arrays, and for each slot the index of its example within the chunk, -1 for padding. On
        several devices both have a leading axis of shards.
    batches: in dataset order, with `batch_size` examples each except the last.
    rows: dataset indices of each batch's rows.
    """

    passes: list[tuple[Batch, np.ndarray]]
    batches: list[LossBatch]
    rows: list[list[int]]
    batch_size: int

    def restored(self, outputs: Sequence[Any]) -> list[Any]:
        """Reorder outputs from passes to batches.

        Args:
            outputs: for each pass, float32 `[X]` or `[shards, X]`, or a dict of such arrays.

        Returns:
            For each batch `[texts * batch_size]`, or a dict of such arrays.
        """
        if not isinstance(outputs[0], dict):
            return self._restored(outputs)
        by_name = {name: self._restored([output[name] for output in outputs]) for name in outputs[0]}
        return [{name: parts[index] for name, parts in by_name.items()} for index in range(len(self.batches))]

    def _restored(self, outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        texts = outputs[0].shape[-1] // self.passes[0][1].shape[-1]
        restored = np.zeros((texts, len(self.batches) * self.batch_size), np.float32)
        for (_, examples), output in zip(self.passes, outputs, strict=True):
            by_text = np.moveaxis(output.reshape(*examples.shape[:-1], texts, -1), -2, 0)
            restored[:, examples[examples >= 0]] = by_text[:, examples >= 0]
        return [part.reshape(-1) for part in np.split(restored, len(self.batches), axis=1)]


class EvalChunks:
    """Iterates over the batches of a loader, one chunk at a time.

    All packed rows have the same length, about the tokens of a batch, so that usually only one shape is compiled.

    Args:
        sort: whether padded rows may be regrouped by length; False if the model's results depend on the other rows.
        whole: whether each pass must hold exactly the examples of one batch.
    """

    def __init__(self, loader: ExampleLoader, *, sort: bool, whole: bool = False):
        self._loader, self._layout = loader, loader.step_layout
        self._sort, self._whole = sort and not whole, whole
        self._row_length = self._text_length = 0  # of packed rows, and of their view rows

    def __iter__(self) -> Iterator[EvalChunk]:
        gathered = []
        for group in self._loader.groups():
            gathered += group
            if len(gathered) == CHUNK_BATCHES:
                yield self._chunk(gathered)
                gathered = []
        if gathered:
            yield self._chunk(gathered)

    def _chunk(self, indexed: list[list[IndexedExample]]) -> EvalChunk:
        layout, batches = self._layout, [[item.example for item in batch] for batch in indexed]
        rows = [[item.index for item in batch] for batch in indexed]
        passes = self._padded_passes(batches) if layout.layout == "padded" else self._packed_passes(batches)
        per_token = layout.weighting != "examples"
        parts = [loss_batch(batch, layout.batch_size, per_token=per_token) for batch in batches]
        return EvalChunk(passes, parts, rows, layout.batch_size)

    def _padded_passes(self, batches: list[list[Example]]) -> list[tuple[Batch, np.ndarray]]:
        layout, examples = self._layout, [example for batch in batches for example in batch]
        order = np.arange(len(examples))
        if self._sort:
            order = np.argsort([-example.longest for example in examples], kind="stable")
        passes, share = [], self._share
        for start in range(0, len(examples), layout.batch_size):
            indices = order[start : start + layout.batch_size]
            by_share = [[examples[n] for n in indices[i : i + share]] for i in range(0, len(indices), share)]
            padding = {"pad_token_id": layout.pad_token_id, "pad_to_multiple_of": layout.pad_to_multiple_of}
            arrays = pad_examples(by_share, examples=share, count=layout.shards, **padding)
            slots = np.full(layout.batch_size, -1)
            slots[: len(indices)] = indices
            passes.append((arrays, self._by_shard(slots)))
        return passes

    def _packed_passes(self, batches: list[list[Example]]) -> list[tuple[Batch, np.ndarray]]:
        layout = self._layout
        placed = place(batches, examples=layout.batch_size, share_prefix=layout.layout == "shared")
        # Rotary embeddings that depend on the longest text use the longest text in the batch of TRL's rank.
        longest = dict(zip((entry.slot for entry in placed), longest_in_batch(placed, self._share), strict=True))
        if self._whole:
            slots = self._share
            rows = [list(row) for _, row in groupby(placed, key=lambda entry: entry.slot // slots)]
            self._lengthen(placed, max(sum(entry.tokens for entry in row) for row in rows))
        else:
            slots = 2 * self._share
            mean = sum(entry.tokens for entry in placed) // (len(batches) * layout.shards)
            self._lengthen(placed, max(mean, *(entry.tokens for entry in placed)))
            rows = _fitting(placed, self._row_length, slots)
        return [self._pass(rows[i : i + layout.shards], slots, longest) for i in range(0, len(rows), layout.shards)]

    def _lengthen(self, placed: list[Placed], tokens: int) -> None:
        """Make packed rows long enough for `tokens` tokens, and view rows for the longest text."""
        self._row_length = max(self._row_length, self._layout.buckets(tokens))
        if self._layout.views is not None:
            longest = max(entry.example.longest_document for entry in placed)
            self._text_length = max(self._text_length, self._layout.views(self._row_length, longest)[1])

    def _pass(self, rows: list[list[Placed]], slots: int, longest: dict[int, int]) -> tuple[Batch, np.ndarray]:
        """A pass with one packed row per shard, with `slots` slots each. `longest` is by slot."""
        layout = self._layout
        view = None if layout.views is None else RowViewShape(slots, self._text_length)
        arrays = pack_examples(
            [entry._replace(slot=slot) for row in rows for slot, entry in enumerate(row)],
            [shard for shard, row in enumerate(rows) for _ in row],
            PackingSpec(layout.pad_token_id, layout.layout == "shared", self._row_length, view),
            micro_batch=step_slots(layout.shards, 1, slots),
            longest_texts=[longest[entry.slot] for row in rows for entry in row],
        )
        examples = np.full((layout.shards, slots), -1)
        for shard, row in enumerate(rows):
            examples[shard, : len(row)] = [entry.slot for entry in row]
        return arrays, self._by_shard(examples)

    @property
    def _share(self) -> int:
        """Examples per batch and shard."""
        return self._layout.batch_size // self._layout.shards

    def _by_shard(self, slots: np.ndarray) -> np.ndarray:
        return slots.reshape(-1) if self._layout.shards == 1 else slots.reshape(self._layout.shards, -1)


def _fitting(placed: list[Placed], length: int, max_examples: int) -> list[list[Placed]]:
    """Pack examples into rows of at most `length` tokens and `max_examples` examples: first-fit decreasing."""
    rows, free = [], []
    for entry in sorted(placed, key=lambda entry: -entry.tokens):
        fits = (i for i, space in enumerate(free) if space >= entry.tokens and len(rows[i]) < max_examples)
        row = next(fits, len(rows))
        if row == len(rows):
            rows.append([])
            free.append(length)
        rows[row].append(entry)
        free[row] -= entry.tokens
    return rows


# Training loader


@dataclass
class ExampleLoader:
    """Iterates over the steps of the epoch chosen with `set_epoch`.

    On several devices the last micro-batch of an epoch is filled up with the first examples of the epoch, as on TRL's
    ranks. `fill_last` overrides this, so that a run resumed on a different number of devices keeps its order.
    """

    dataset: Dataset | IterableDataset
    columns: Columns
    example: Callable[[dict[str, Any]], Example]  # builds an example from a row
    step_layout: StepLayout
    fill_last: bool | None = None  # None: only with several shards
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False
    lengths: np.ndarray | None = None  # lengths of the rows, to group rows of similar length
    where: str = ""  # name of the dataset in errors of `example`; "" if rows were checked beforehand
    image_rows: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None  # `Task.image_rows`
    sampler_order: Callable[[int], np.ndarray] | None = None  # user-defined order of the rows in an epoch
    epoch: int = 0
    skipped: int = 0
    skipped_digest: int | None = None

    @property
    def batch_size(self) -> int:
        """Examples per micro-batch."""
        return self.step_layout.batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches per step."""
        return self.step_layout.accumulation

    def with_layout(self, **changes: Any) -> ExampleLoader:
        """A copy with these fields of the layout changed."""
        return replace(self, step_layout=replace(self.step_layout, **changes))

    def in_order(self, order: Callable[[int], np.ndarray]) -> ExampleLoader:
        """A copy with a user-defined order: epoch -> row indices."""
        return replace(self, sampler_order=order)

    def set_epoch(self, epoch: int, skip: int = 0, skipped_digest: int | None = None) -> None:
        """Make the next iteration yield this epoch without its first `skip` examples.

        A stream is still read from its start, so that a shuffled stream has the same order. Iteration raises ValueError
        if the digest of the skipped examples differs from `skipped_digest`.
        """
        self.epoch, self.skipped, self.skipped_digest = epoch, skip, skipped_digest
        if isinstance(self.dataset, IterableDataset):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Steps per epoch; TypeError if the dataset has no length."""
        rows = len(self.dataset)
        batches = rows // self.batch_size if self.drop_last else math.ceil(rows / self.batch_size)
        return math.ceil(batches / self.accumulation)

    def __iter__(self) -> Iterator[StepBatch]:
        first = 0 if isinstance(self.dataset, IterableDataset) else self._steps_before()
        for number, group in enumerate(self.groups(), start=first):
            yield self.step_layout.step(group, number)

    def _steps_before(self) -> int:
        """Number of steps that the run takes before the next iteration."""
        return self.epoch * len(self) + self.skipped // (self.batch_size * self.accumulation)

    def groups(self) -> Iterator[list[list[IndexedExample]]]:
        """Iterate over steps as lists of micro-batches of examples."""
        return micro_batches(self._micro_batches(), self.accumulation, drop_last=False)

    def _micro_batches(self) -> Iterator[list[IndexedExample]]:
        if isinstance(self.dataset, IterableDataset):
            for batch in micro_batches(self._stream(), self.batch_size, drop_last=self.drop_last):
                rows, indices, digests = zip(*batch, strict=True)
                yield [
                    example._replace(digest=digest)
                    for example, digest in zip(self.examples(rows, indices), digests, strict=True)
                ]
            return
        columns = self.dataset.select_columns([name for name in self.columns.all if name in self.dataset.column_names])
        order = self.order(self.epoch) if self.sampler_order is None else self.sampler_order(self.epoch)
        if self._filling:
            order = filled(order, self.batch_size)
        for indices in micro_batches(order[self.skipped :], self.batch_size, drop_last=self.drop_last):
            yield self.examples(rows_of(columns[np.asarray(indices)]), indices)

    def order(self, epoch: int) -> np.ndarray:
        """The row indices of a table in the order of an epoch."""
        group = self.batch_size * self.accumulation
        options = {"seed": self.seed, "shuffle": self.shuffle, "lengths": self.lengths}
        return epoch_order(len(self.dataset), epoch=epoch, group=group, **options)

    def _stream(self) -> Iterator[tuple[dict[str, Any], int, int]]:
        """The rows of a stream, with their indices and the chained digests up to them."""
        num_read, digest, first = 0, 0, []
        for row in self.dataset:
            digest = row_digest(row, self.columns, digest)
            if num_read < self.batch_size:
                first.append((row, num_read))
            if num_read >= self.skipped:
                yield row, num_read, digest
            num_read += 1
            if num_read == self.skipped:
                self._check_skipped(digest)
        if num_read < self.skipped:
            self._check_skipped(digest)
        missing = -num_read % self.batch_size if self._filling and num_read else 0
        for row, index in islice(cycle(first), max(0, self.skipped - num_read), missing):
            yield row, index, digest

    def examples(self, rows: Sequence[dict[str, Any]], indices: Sequence[int]) -> list[IndexedExample]:
        """Convert the rows of a micro-batch to examples."""
        if self.image_rows is not None:
            share = self.batch_size // self.step_layout.shards
            rows = [row for i in range(0, len(rows), share) for row in self.image_rows(list(rows[i : i + share]))]
        return [IndexedExample(self._example(row, i), int(i)) for row, i in zip(rows, indices, strict=True)]

    def _example(self, row: dict[str, Any], index: int) -> Example:
        if not self.where:
            return self.example(row)
        try:
            return self.example(row)
        except ValueError as error:
            raise ValueError(f"Row {index} of {self.where}: {error}") from error

    @property
    def _filling(self) -> bool:
        fill_last = self.step_layout.shards > 1 if self.fill_last is None else self.fill_last
        return fill_last and not self.drop_last

    def _check_skipped(self, digest: int) -> None:
        if self.skipped_digest not in (None, digest):
            raise ValueError(
                f"train_dataset is not the stream that the checkpoint was trained on: its first {self.skipped:,} rows "
                "differ. Pass the same stream, or ignore_data_skip=True to restart the epoch."
            )


# Digests, to tell whether two datasets have the same examples, independent of files and caches


def fingerprint(dataset: Dataset, columns: Columns) -> str:
    """Hexadecimal digest of all examples of a prepared table, in order: ids, lengths and numbers.

    For prompts with a transform, it is the digest of the rows that the transform gets.
    """
    if columns.prompts is not None and has_transform(dataset):
        digest = xxhash.xxh3_128()
        for row in dataset.with_format(None):
            digest.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
        return digest.hexdigest()
    if columns.raw:
        digest = xxhash.xxh3_128()
        for row in _undecoded(dataset):
            digest.update(raw_row(row).encode() + b"\n")
        return digest.hexdigest()
    numbers = [name for name in columns.numbers if name in dataset.column_names]
    lists = [name for name in _lists(columns) if name in dataset.column_names]
    names = (*lists, *numbers)
    digest = xxhash.xxh3_128(" ".join(names).encode())
    for _, block in blocks(dataset, names):
        for column in lists:
            rows = block.column(column).combine_chunks()
            digest.update(rows.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64))
            digest.update(rows.flatten().to_numpy(zero_copy_only=False).astype(np.int64))
        for column in numbers:
            digest.update(block.column(column).to_numpy().astype(np.float64))
    if columns.prompts is not None:
        for prompt in dataset[columns.prompts]:
            digest.update(json.dumps(prompt, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _undecoded(dataset: Dataset) -> Dataset:
    """The same rows, with images as paths and bytes instead of decoded."""
    for name, feature in dataset.features.items():
        value_type = feature.feature if isinstance(feature, List) else feature
        if isinstance(value_type, Image):
            undecoded = Image(decode=False)
            dataset = dataset.cast_column(name, List(undecoded) if value_type is not feature else undecoded)
    return dataset


def raw_row(row: dict[str, Any]) -> str:
    """A canonical text of a row with images, in which bytes and pixels are replaced by digests."""

    def describe(value: Any) -> str:
        if isinstance(value, bytes):
            return f"{len(value)} bytes {xxhash.xxh3_64(value).hexdigest()}"
        pixels = np.asarray(value)  # an array or a PIL image; any other object becomes an object array
        return repr(value) if pixels.dtype == object else f"{pixels.shape} {describe(pixels.tobytes())}"

    return json.dumps(row, sort_keys=True, default=describe)


def _lists(columns: Columns) -> tuple[str, ...]:
    """The columns of integer lists."""
    return (*columns.texts, *columns.labels, *([columns.documents] if columns.documents else []))


def row_digest(row: dict[str, Any], columns: Columns, so_far: int) -> int:
    """64-bit digest of a stream up to and including this row, chained from the digest `so_far`."""
    digest = xxhash.xxh3_64(seed=so_far)
    if columns.raw:
        digest.update(raw_row({name: row.get(name) for name in columns.raw}).encode())
        return digest.intdigest()
    for column in _lists(columns):
        digest.update(np.asarray(row.get(column, ()), np.int64))
        digest.update(b"|")
    for column in columns.numbers:
        digest.update(np.float64(row.get(column) or 0.0).tobytes())
    return digest.intdigest()


# Order of rows (identical to TRL's) and length of a run


def epoch_order(
    rows: int, *, seed: int, epoch: int, shuffle: bool, lengths: np.ndarray | None = None, group: int = 1
) -> np.ndarray:
    """Row indices of one epoch, `[rows]`: `torch.randperm` seeded with `seed + epoch`; 0, 1, 2, ... without `shuffle`.

    Args:
        lengths: lengths of the rows; if not None, rows of similar length are grouped into steps of `group` rows.
    """
    order = TorchGenerator(seed + epoch).permutation(rows) if shuffle else np.arange(rows)
    return order if lengths is None else grouped_by_length(order, lengths, group)


def grouped_by_length(order: np.ndarray, lengths: np.ndarray, batch_size: int) -> np.ndarray:
    """Group rows of similar length, like transformers' LengthGroupedSampler with this `order`.

    Megabatches of up to 50 batches are sorted by length; there are at least four per epoch if there are enough batches.
    The longest row comes first, so that an out-of-memory error occurs in the first step.
    """
    run = max(1, min(len(order) // (batch_size * 4), 50)) * batch_size
    runs = [sorted(order[i : i + run], key=lambda row: lengths[row], reverse=True) for i in range(0, len(order), run)]
    longest = int(np.argmax([lengths[rows[0]] for rows in runs]))
    runs[0][0], runs[longest][0] = runs[longest][0], runs[0][0]
    return np.concatenate(runs)


def micro_batches(items: Iterator[Any], size: int, *, drop_last: bool) -> Iterator[list]:
    """Split items into groups of `size`; a shorter last group is dropped with `drop_last`."""
    items = iter(items)
    while batch := list(islice(items, size)):
        if len(batch) == size or not drop_last:
            yield batch


@dataclass(frozen=True)
class RunLength:
    """The length of a run in optimizer steps; the last step of an epoch may have fewer micro-batches.

    micro_batches_per_epoch: for a dataset without a length, the number that `max_steps` needs.
    """

    max_steps: int
    num_epochs: int
    micro_batches_per_epoch: int


def run_length(
    rows: int | None, *, batch_size: int, accumulation: int, drop_last: bool, epochs: float, max_steps: int
) -> RunLength:
    """The length of a run from TRL's arguments: `max_steps` overrides `epochs`; an incomplete last step is included.

    Raises:
        ValueError: the dataset has no length and `max_steps` is not set, or `drop_last` leaves no batch.
    """
    if rows is None:
        if max_steps <= 0:
            raise ValueError(
                f"train_dataset has no length, so max_steps must be set, but it is {max_steps}. Set it in the config."
            )
        return RunLength(max_steps, sys.maxsize, max_steps * accumulation)
    batches = rows // batch_size if drop_last else math.ceil(rows / batch_size)
    if batches == 0:
        raise ValueError(
            f"dataloader_drop_last=True leaves no batch: {rows} rows with a batch size of {batch_size}. Lower the "
            "batch size."
        )
    steps = math.ceil(batches / accumulation)
    if max_steps > 0:
        return RunLength(max_steps, math.ceil(max_steps / steps), batches)
    return RunLength(math.ceil(epochs * steps), math.ceil(epochs), batches)


# Step layout: from examples to arrays


class IndexedExample(NamedTuple):
    """An example with its index and, for a stream, the chained digest up to it.

    index: index of its row in the dataset (for a stream, within the epoch), or a number chosen by the caller.
    """

    example: Example
    index: int
    digest: int | None = None


class StepBatch(NamedTuple):
    """The arrays of one optimizer or evaluation step, with counts.

    num_micro_batches, num_examples, num_tokens: totals without padding.
    num_texts: texts per example.
    num_primary_tokens: tokens of the texts that token metrics include (`Example.num_primary_texts`).
    num_targets: the divisor of a mean over tokens.
    num_padded_tokens: `num_primary_tokens` with TRL's padding: rows padded to the longest of the micro-batch, or
        concatenated (padding-free).
    num_places: tokens computed in this layout, padding included.
    num_images: images, where texts of a pass that share an image count it once.
    num_image_uses: images, counted for each text that shows them.
    rows: index of each example.
    passes: indices of the examples in each pass.
    rows_digest: digest of a stream from the start of the epoch to the end of this batch.
    """

    arrays: Batch
    num_micro_batches: int
    num_examples: int
    num_texts: int
    num_tokens: int
    num_primary_tokens: int
    num_targets: int
    num_padded_tokens: int
    num_places: int
    num_images: int
    num_image_uses: int
    rows: list[int]
    passes: list[list[int]]
    rows_digest: int | None

    def values_by_row(self, values: np.ndarray) -> dict[int, tuple[np.ndarray, ...]]:
        """Split values per read into values per row and text, in the order of `Example.targets`.

        Args:
            values: shaped like `arrays.reads`, from a language modeling head.
        """
        by_row, examples = {}, self.arrays.weight.shape[-1]
        for rows, index in zip(self.passes, np.ndindex(self.arrays.weight.shape[:-1]), strict=True):
            part, text = values[index], self.arrays.text[index]
            for row, slot in zip(rows, np.flatnonzero(self.arrays.weight[index]), strict=True):
                by_row[row] = tuple(part[text == i * examples + slot] for i in range(self.num_texts))
        return by_row


@dataclass(frozen=True)
class StepLayout:
    """Lays out the examples of a step as arrays.

    A micro-batch has `batch_size` examples and a step `accumulation` micro-batches. In the padded layout each
    micro-batch is a pass. In the packed and shared layouts the examples of a step are distributed over `accumulation`
    packed rows regardless of their micro-batch, unless `whole_micro_batches`. On several devices each micro-batch is
    divided over `shards`, and arrays have a shard axis after the pass axis.

    The loss of a step is a weighted sum over its examples. Depending on `weighting`, it is TRL's mean over
    micro-batches of the mean over their examples ("examples"), the mean over all targets ("tokens"), or the mean over
    micro-batches ("micro_batches") or shards ("shards") of the mean over their targets.

    Attributes:
        layout: "padded", "packed", or "shared": packed, with the common prefix of an example's two texts stored once.
        buckets: the lengths of packed rows.
        views: replaces `buckets` if attention views the texts of packed rows as rows.
        divided: False lays out examples for a single device, regardless of `shards`.
        trains: whether these are training steps, in which means over targets use transformers' count of targets
            (`Example.num_counted_targets`); evaluation uses the number of all targets.
        padding_free: whether TRL's collator concatenates the texts of a micro-batch and pads them as one.
    """

    batch_size: int
    pad_token_id: int
    pad_to_multiple_of: int | str | None
    layout: str = "padded"
    buckets: Buckets = Buckets()
    weighting: Weighting = "examples"
    views: ViewBuckets | None = None
    accumulation: int = 1
    whole_micro_batches: bool = False
    shards: int = 1
    divided: bool = True
    trains: bool = True
    padding_free: bool = False

    def step(self, group: Sequence[Sequence[IndexedExample]], number: int) -> StepBatch:
        """Build the arrays of a step.

        Args:
            group: the examples of at most `accumulation` micro-batches, at most `batch_size` each.
            number: number of the step in the run; determines which `buckets` are available.
        """
        runs = by_shard([[indexed.example for indexed in batch] for batch in group], self._array_shards)
        weights = self._weights(group, runs)
        if self.layout == "padded":
            arrays, pass_of = self._padded(runs, weights)
        else:
            arrays, pass_of = self._packed(runs, weights, number)
        if self.whole_micro_batches:
            arrays = arrays._replace(pass_weight=pass_weights(arrays.weight > 0))
        rows = [indexed.index for batch in group for indexed in batch]
        primary = [
            [length for example in run for length in example.lengths[: example.num_primary_texts]] for run in runs
        ]
        num_images, num_image_uses = self._image_counts(runs, pass_of)
        return StepBatch(
            arrays,
            num_micro_batches=len(group),
            num_examples=len(rows),
            num_texts=len(group[0][0].example.texts),
            num_tokens=sum(sum(example.lengths) for run in runs for example in run),
            num_primary_tokens=sum(map(sum, primary)),
            num_targets=sum(map(self._targets, runs)),
            num_padded_tokens=sum(map(self._trl_tokens, primary)),
            num_places=arrays.tokens.size,
            num_images=num_images,
            num_image_uses=num_image_uses,
            rows=rows,
            passes=[[row for row, i in zip(rows, pass_of, strict=True) if i == p] for p in range(self._num_runs)],
            rows_digest=group[-1][-1].digest,
        )

    @property
    def _array_shards(self) -> int:
        """Shards that the arrays of a step are divided over."""
        return self.shards if self.divided else 1

    @property
    def _num_runs(self) -> int:
        """Number of runs (see `by_shard`) of a full step, each with `_run_examples` examples; also its packed rows."""
        return self.accumulation * self._array_shards

    @property
    def _run_examples(self) -> int:
        return self.batch_size // self._array_shards

    def _weights(self, group: Sequence[Sequence[IndexedExample]], runs: list[list[Example]]) -> list[float]:
        """The weight of an example in each run of `by_shard`, according to `weighting`."""
        shards = self._array_shards
        if self.weighting == "examples":
            return [1 / (len(group) * len(batch)) for batch in group for _ in range(shards)]
        if self.weighting == "micro_batches":
            return [1 / (len(runs) * max(1, sum(example.num_targets for example in run))) for run in runs]
        targets = np.asarray([self._targets(run) for run in runs]).reshape(-1, shards)
        if self.weighting == "tokens":
            return [1 / max(1, int(targets.sum()))] * len(runs)
        return (1 / (shards * np.maximum(1, targets.sum(axis=0)))).tolist() * len(group)

    def _image_counts(self, runs: list[list[Example]], pass_of: Sequence[int]) -> tuple[int, int]:
        """`num_images` and `num_image_uses` of `StepBatch`; packed rows share no images between examples."""
        counts, uses = {}, 0
        examples = [example for run in runs for example in run]
        for index, (example, pass_index) in enumerate(zip(examples, pass_of, strict=True)):
            is_unshared = example.context is None or self.layout == "packed"
            counts[pass_index, index if is_unshared else example.context.key] = len(example.images)
            uses += len(example.images) * len(example.texts)
        return sum(counts.values()), uses

    def _targets(self, examples: Sequence[Example]) -> int:
        """The divisor of a mean over the targets of these examples."""
        return sum(example.num_counted_targets if self.trains else example.num_targets for example in examples)

    def _padded(self, runs: list[list[Example]], weights: list[float]) -> tuple[Batch, list[int]]:
        """The arrays of a step, and for each example its (pass * shards + shard)."""
        padding = {"pad_token_id": self.pad_token_id, "pad_to_multiple_of": self.pad_to_multiple_of}
        arrays = pad_examples(runs, examples=self._run_examples, count=self._num_runs, weights=weights, **padding)
        pass_of = [index for index, run in enumerate(runs) for _ in run]
        return (arrays if self._array_shards == 1 else sharded_rows(arrays, self._array_shards)), pass_of

    def _packed(self, runs: list[list[Example]], weights: list[float], number: int) -> tuple[Batch, list[int]]:
        """The same in packed rows, one for each pass and shard."""
        shards, examples, share_prefix = self._array_shards, self._run_examples, self.layout == "shared"
        placed = place(runs, examples=examples, share_prefix=share_prefix, weights=weights)
        longest_texts = longest_in_batch(placed, examples)
        max_examples = self._max_examples()
        if self.whole_micro_batches:
            row_of = [entry.slot // examples for entry in placed]
        else:
            row_of = assign_rows(placed, self._num_runs, max_examples)
        if shards == 1 and not self.whole_micro_batches:
            micro_batch = step_slots(self._num_runs, self.accumulation, examples)
        else:
            sizes = {"rows": self._num_runs, "count": self.accumulation, "examples": examples * shards}
            slots = examples if self.whole_micro_batches else room(examples, self.accumulation)
            placed, micro_batch = row_slots(placed, row_of, slots=slots, **sizes)
        tokens, view = fullest_row(placed, row_of), None
        if self.views is None:
            length = self.buckets(tokens, number)
        else:
            length, text_length = self.views(tokens, max(entry.example.longest_document for entry in placed))
            view = RowViewShape(max_examples, text_length)
        spec = PackingSpec(self.pad_token_id, share_prefix, length, view)
        arrays = pack_examples(placed, row_of, spec, micro_batch=micro_batch, longest_texts=longest_texts)
        return (arrays if shards == 1 else in_shards(arrays, shards)), row_of

    def _max_examples(self) -> int | None:
        """Maximum number of examples in a packed row; None: no limit."""
        if self.whole_micro_batches:
            return self._run_examples
        if self.views is not None:
            return self._run_examples if self._num_runs == 1 else 2 * self._run_examples
        return None if self._array_shards == 1 else room(self._run_examples, self.accumulation)

    def _trl_tokens(self, lengths: list[int]) -> int:
        """Number of tokens, padding included, in TRL's batch of texts with these lengths."""
        if self.padding_free or not lengths:
            return self._trl_length(sum(lengths))
        return len(lengths) * self._trl_length(max(lengths))

    def _trl_length(self, longest: int) -> int:
        """Row length of TRL's collator, which has no "auto" lengths."""
        return longest if self.pad_to_multiple_of == "auto" else padded_length(longest, self.pad_to_multiple_of)
