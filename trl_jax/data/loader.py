"""Order prepared rows and load them as batches, one per optimizer step. Pure NumPy."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, groupby, islice
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash
from datasets import Dataset, IterableDataset

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.data.batch import Batch, Columns, Example, LossBatch, loss_batch, padded_length
from trl_jax.data.checks import blocks, has_transform
from trl_jax.data.layout_plan import Buckets, ViewBuckets
from trl_jax.data.packed import (
    PackingSpec,
    Placed,
    RowViewShape,
    bins_of,
    by_shard,
    filled,
    in_shards,
    longest_in_batch,
    pack_examples,
    packed_passes,
    pad_examples,
    pass_weights,
    place,
    room,
    sharded_rows,
)

# ----------------------------------------------------------------------------------------------------
# Chunks of an evaluation set: within one, examples are laid out by length; their outputs are put back in order.


CHUNK_BATCHES = 64  # batches in a chunk


@dataclass
class EvalChunk:
    """Some batches, and the passes that compute the outputs of their examples.

    passes: the arrays to compute on, and for each of their slots the number of its example within the chunk, or -1 for
        padding; on several devices both have a leading axis of shards.
    batches: in the set's order, `batch_size` examples each except the last.
    rows: indices of each batch's rows in the set.
    """

    passes: list[tuple[Batch, np.ndarray]]
    batches: list[LossBatch]
    rows: list[list[int]]
    batch_size: int

    def restored(self, outputs: Sequence[Any]) -> list[Any]:
        """Reorder outputs by pass to outputs by batch.

        Args:
            outputs: of each pass, float32 `[X]` or `[shards, X]`, or such arrays by name.

        Returns:
            Of each batch `[texts * batch_size]`, or such arrays by name.
        """
        if not isinstance(outputs[0], dict):
            return self._restored(outputs)
        by_name = {name: self._restored([output[name] for output in outputs]) for name in outputs[0]}
        return [{name: parts[number] for name, parts in by_name.items()} for number in range(len(self.batches))]

    def _restored(self, outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        texts = outputs[0].shape[-1] // self.passes[0][1].shape[-1]
        restored = np.zeros((texts, len(self.batches) * self.batch_size), np.float32)
        for (_, examples), output in zip(self.passes, outputs, strict=True):
            by_text = np.moveaxis(output.reshape(*examples.shape[:-1], texts, -1), -2, 0)
            restored[:, examples[examples >= 0]] = by_text[:, examples >= 0]
        return [part.reshape(-1) for part in np.split(restored, len(self.batches), axis=1)]


class EvalChunks:
    """Iterates over the batches of a loader, a chunk of them at a time.

    sort: whether padded rows may be batched with rows of other batches; False where a model's numbers depend on that.
    whole: whether each pass has the examples of one batch, on several devices each one's part of it.

    All packed rows get the same length, about the tokens of a batch, so that rarely more than one shape compiles.
    """

    def __init__(self, loader: ExampleLoader, *, sort: bool, whole: bool = False):
        self._loader, self._layout = loader, loader.step_layout
        self._sort, self._whole = sort and not whole, whole
        self._packed = self._text = 0  # lengths of packed rows and of their longest texts

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
        layout, batches = self._layout, [[one.example for one in batch] for batch in indexed]
        rows = [[one.index for one in batch] for batch in indexed]
        passes = self._padded_passes(batches) if layout.layout == "padded" else self._packed_passes(batches)
        per_token = layout.weighting != "examples"
        parts = [loss_batch(batch, layout.batch_size, per_token=per_token) for batch in batches]
        return EvalChunk(passes, parts, rows, layout.batch_size)

    def _padded_passes(self, batches: list[list[Example]]) -> list[tuple[Batch, np.ndarray]]:
        layout, examples = self._layout, [example for batch in batches for example in batch]
        longest = [-example.longest for example in examples]
        order = np.argsort(longest, kind="stable") if self._sort else np.arange(len(examples))
        passes, size = [], self._share
        for start in range(0, len(examples), layout.batch_size):
            numbers = order[start : start + layout.batch_size]
            shares = [numbers[at : at + size] for at in range(0, len(numbers), size)]
            padding = {"pad_token_id": layout.pad_token_id, "pad_to_multiple_of": layout.pad_to_multiple_of}
            by_share = [[examples[number] for number in share] for share in shares]
            arrays = pad_examples(by_share, examples=size, count=layout.shards, **padding)
            slots = np.full(layout.batch_size, -1)
            slots[: len(numbers)] = numbers
            passes.append((arrays, self._by_shard(slots)))
        return passes

    def _packed_passes(self, batches: list[list[Example]]) -> list[tuple[Batch, np.ndarray]]:
        layout, shards = self._layout, self._layout.shards
        max_examples = self._share if self._whole else 2 * self._share
        placed = place(batches, examples=layout.batch_size, share_prefix=layout.layout == "shared")
        parts = _parts(placed, self._share) if self._whole else None
        self._packed = max(self._packed, layout.buckets(self._tokens(placed, parts, len(batches))))
        if layout.views is not None:
            _, text = layout.views(self._packed, max(one.example.longest_document for one in placed))
            self._text = max(self._text, text)
        # Rotary embeddings that depend on the longest text use that of the batch of one of TRL's ranks.
        longest = dict(zip((one.slot for one in placed), longest_in_batch(placed, self._share), strict=True))
        fitting = _fitting(placed, self._packed, max_examples) if parts is None else parts
        return [self._pass(fitting[at : at + shards], max_examples, longest) for at in range(0, len(fitting), shards)]

    def _pass(self, rows: list[list[Placed]], max_examples: int, longest: dict[int, int]) -> tuple[Batch, np.ndarray]:
        layout = self._layout
        view = None if layout.views is None else RowViewShape(max_examples, lambda *_: (self._packed, self._text))
        arrays = pack_examples(
            [one._replace(slot=slot) for row in rows for slot, one in enumerate(row)],
            [number for number, row in enumerate(rows) for _ in row],
            PackingSpec(layout.pad_token_id, layout.layout == "shared", lambda _: self._packed, view),
            examples=max_examples,
            count=1,
            rows=layout.shards,
            longest_texts=[longest[one.slot] for row in rows for one in row],
        )
        slots = np.full((layout.shards, max_examples), -1)
        for number, row in enumerate(rows):
            slots[number, : len(row)] = [one.slot for one in row]
        return arrays, self._by_shard(slots)

    def _tokens(self, placed: list[Placed], parts: list[list[Placed]] | None, batches: int) -> int:
        """The tokens that a packed row has to have room for: of the largest of the parts, else of an average batch."""
        if parts is not None:
            return max(sum(one.tokens for one in part) for part in parts)
        mean = sum(one.tokens for one in placed) // (batches * self._layout.shards)
        return max(mean, *(one.tokens for one in placed))

    @property
    def _share(self) -> int:
        """Number of examples of a batch on each shard."""
        return self._layout.batch_size // self._layout.shards

    def _by_shard(self, slots: np.ndarray) -> np.ndarray:
        return slots.reshape(-1) if self._layout.shards == 1 else slots.reshape(self._layout.shards, -1)


def _parts(placed: list[Placed], size: int) -> list[list[Placed]]:
    """The examples of each run of `size` slots."""
    return [list(part) for _, part in groupby(placed, key=lambda one: one.slot // size)]


def _fitting(placed: list[Placed], length: int, max_examples: int) -> list[list[Placed]]:
    """Packed rows of at most `length` tokens and `max_examples` examples: first fit, the longest first."""
    rows, left = [], []
    for one in sorted(placed, key=lambda one: -one.tokens):
        fits = (i for i, room in enumerate(left) if room >= one.tokens and len(rows[i]) < max_examples)
        at = next(fits, len(rows))
        if at == len(rows):
            rows.append([])
            left.append(length)
        rows[at].append(one)
        left[at] -= one.tokens
    return rows


# ----------------------------------------------------------------------------------------------------
# Load prepared rows as batches of arrays, one for each optimizer step.


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


# ----------------------------------------------------------------------------------------------------
# Digests of prepared rows, to tell whether two datasets have the same examples, whatever file or cache they are from.


def fingerprint(dataset: Dataset, columns: Columns) -> str:
    """The digest of all examples of a prepared table in order: ids, lengths and numbers. A hexadecimal string.

    Of prompts that a transform makes, it is the digest of the rows that the transform gets.
    """
    if columns.prompts is not None and has_transform(dataset):
        digest = xxhash.xxh3_128()
        for row in dataset.with_format(None):
            digest.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
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


def _lists(columns: Columns) -> tuple[str, ...]:
    """The columns that have a list of integers in each row."""
    return (*columns.texts, *columns.labels, *([columns.documents] if columns.documents else []))


def row_digest(row: dict[str, Any], columns: Columns, so_far: int) -> int:
    """The digest of a stream's examples up to this row: 64 bits, chained from `so_far`, the digest up to the row
    before."""
    digest = xxhash.xxh3_64(seed=so_far)
    for column in _lists(columns):
        digest.update(np.asarray(row.get(column, ()), np.int64))
        digest.update(b"|")
    for column in columns.numbers:
        digest.update(np.float64(row.get(column) or 0.0).tobytes())
    return digest.intdigest()


# ----------------------------------------------------------------------------------------------------
# The order in which a run reads its rows, the same as TRL's to the index, and the length of a run.


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


# ----------------------------------------------------------------------------------------------------
# How the examples of an optimizer step, or of a step of an evaluation, become arrays.


Weighting = Literal["examples", "tokens", "shards"]


class IndexedExample(NamedTuple):
    """An example, the index by which it is told of and, of a stream, the digest up to it.

    index: of its row in the dataset, of a stream in its epoch; or the number that whoever makes the example gives it.
    """

    example: Example
    index: int
    digest: int | None = None


class StepBatch(NamedTuple):
    """The arrays of one optimizer step or one evaluation step, and counts of them.

    num_micro_batches, num_examples, num_tokens: of real ones, without padding. num_texts: of each example.
    num_primary_tokens: of them those of texts that count (`Example.num_primary_texts`).
    num_targets: of the examples together, those that a mean over tokens is divided by.
    num_padded_tokens: the same as TRL computes them: each row of a micro-batch as long as its longest, or end to end.
    num_places: tokens that are computed on here, padding included.
    rows: the index of each example. passes: those that are in each pass.
    rows_digest: of a stream's examples from the first of the epoch to the last of this batch.
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
    rows: list[int]
    passes: list[list[int]]
    rows_digest: int | None

    def of_reads(self, values: np.ndarray) -> dict[int, tuple[np.ndarray, ...]]:
        """For each of `rows` the values of the reads of each text, in the order of `Example.targets`.

        Args:
            values: of every read, in the form of `arrays.reads`, under a language model's head.
        """
        found, examples = {}, self.arrays.weight.shape[-1]
        for rows, index in zip(self.passes, np.ndindex(self.arrays.weight.shape[:-1]), strict=True):
            own, text = values[index], self.arrays.text[index]
            for row, slot in zip(rows, np.flatnonzero(self.arrays.weight[index]), strict=True):
                found[row] = tuple(own[text == number * examples + slot] for number in range(self.num_texts))
        return found


@dataclass(frozen=True)
class StepLayout:
    """How examples are laid out: it knows neither where they come from nor their order.

    `batch_size` examples make a micro-batch, `accumulation` micro-batches a step. In the padded layout a micro-batch is
    a pass; in the packed and shared layouts a step's examples fill as many packed rows, whatever their micro-batch,
    unless `by_micro_batch` keeps those of each together. On several devices, `shards` of them divide each micro-batch,
    and arrays have an axis of shards after that of passes.

    The loss of a step is a sum over its examples, whose weights are by `weighting` TRL's mean over micro-batches of
    means over "examples", a mean over "tokens" (the step's targets), or over "shards" of means over each one's targets.

    Attributes:
        layout: "padded", "packed", or "shared": packed, and what the two texts of an example begin with only once.
        buckets: the lengths of packed rows.
        views: in place of the buckets, where attention reads the texts of packed rows as rows.
        divided: False lays examples out for one device, whatever `shards`.
        trains: whether the batches are those of steps, whose means over tokens are as transformers counts them
            (`Example.num_counted_targets`); in an evaluation they are over all targets.
        padding_free: whether TRL's collator lays the texts of a micro-batch end to end: it then pads all as one.
    """

    batch_size: int
    pad_token_id: int
    pad_to_multiple_of: int | str | None
    layout: str = "padded"
    buckets: Buckets = Buckets()
    weighting: Weighting = "examples"
    views: ViewBuckets | None = None
    accumulation: int = 1
    by_micro_batch: bool = False
    shards: int = 1
    divided: bool = True
    trains: bool = True
    padding_free: bool = False

    def step(self, group: Sequence[Sequence[IndexedExample]], number: int) -> StepBatch:
        """The arrays of a step, and counts.

        Args:
            group: the examples of each micro-batch: at most `accumulation` of them, of at most `batch_size` each.
            number: of the step in the run, by which `buckets` may serve.
        """
        shards = self.shards if self.divided else 1
        examples = by_shard([[indexed.example for indexed in batch] for batch in group], shards)
        weights = self._weights(group, examples, shards)
        arrays, pass_of = self._laid_out(examples, weights, partial(self.buckets, step=number))
        if self.by_micro_batch:
            arrays = arrays._replace(pass_weight=pass_weights(arrays.weight > 0))
        lengths = [
            [length for example in batch for length in example.lengths[: example.num_primary_texts]]
            for batch in examples
        ]
        rows, passes = [indexed.index for batch in group for indexed in batch], self.accumulation * shards
        return StepBatch(
            arrays,
            num_micro_batches=len(group),
            num_examples=sum(map(len, group)),
            num_texts=len(group[0][0].example.texts),
            num_tokens=sum(sum(example.lengths) for batch in examples for example in batch),
            num_primary_tokens=sum(map(sum, lengths)),
            num_targets=sum(map(self._targets, examples)),
            num_padded_tokens=sum(map(self._trl_tokens, lengths)),
            num_places=arrays.tokens.size,
            rows=rows,
            passes=[[row for row, at in zip(rows, pass_of, strict=True) if at == p] for p in range(passes)],
            rows_digest=group[-1][-1].digest,
        )

    def _weights(
        self, group: Sequence[Sequence[IndexedExample]], runs: list[list[Example]], shards: int
    ) -> list[float]:
        """The weight of the examples of each of `by_shard`'s runs, by `weighting`."""
        if self.weighting == "examples":
            return [1 / (len(group) * len(batch)) for batch in group for _ in range(shards)]
        targets = np.asarray([self._targets(run) for run in runs]).reshape(-1, shards)
        if self.weighting == "tokens":
            return [1 / max(1, int(targets.sum()))] * len(runs)
        return (1 / (shards * np.maximum(1, targets.sum(axis=0)))).tolist() * len(group)

    def _targets(self, examples: Sequence[Example]) -> int:
        """The divisor of a mean over the tokens of these examples."""
        return sum(example.num_counted_targets if self.trains else example.num_targets for example in examples)

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
        share_prefix = self.layout == "shared"
        placed = place(micro_batches, examples=examples, share_prefix=share_prefix, weights=weights)
        max_examples = self._max_examples(examples, passes, shards)
        if self.by_micro_batch:
            pass_of = [one.slot // examples for one in placed]
        else:
            pass_of = bins_of(placed, passes, max_examples)
        view = None if self.views is None else RowViewShape(max_examples, self.views)
        spec = PackingSpec(self.pad_token_id, share_prefix, bucket, view)
        if shards == 1 and not self.by_micro_batch:
            return pack_examples(placed, pass_of, spec, examples=examples, count=passes, rows=passes), pass_of
        most = max_examples if self.by_micro_batch else room(examples, self.accumulation)
        sizes = {"examples": examples, "count": self.accumulation, "shards": shards, "most": most}
        arrays = packed_passes(placed, pass_of, spec, **sizes)
        return (arrays if shards == 1 else in_shards(arrays, shards)), pass_of

    def _max_examples(self, examples: int, passes: int, shards: int) -> int | None:
        """How many examples a packed row may have; None where that is not bounded."""
        if self.by_micro_batch:
            return examples
        if self.views is not None:
            return examples if passes == 1 else 2 * examples
        return None if shards == 1 else room(examples, self.accumulation)

    def _trl_tokens(self, lengths: list[int]) -> int:
        """The tokens of TRL's batch of texts of these lengths."""
        if self.padding_free or not lengths:
            return self._trl_length(sum(lengths))
        return len(lengths) * self._trl_length(max(lengths))

    def _trl_length(self, longest: int) -> int:
        """The row length of TRL's collator, which has no buckets."""
        return longest if self.pad_to_multiple_of == "auto" else padded_length(longest, self.pad_to_multiple_of)
