"""How the examples of an optimizer step, or of a step of an evaluation, become arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from trl_jax.data.example import Example
from trl_jax.data.layout.batch import Batch, padded_length
from trl_jax.data.layout.buckets import Buckets, ViewBuckets
from trl_jax.data.layout.packed import PackingSpec, pack_examples
from trl_jax.data.layout.padded import pad_examples
from trl_jax.data.layout.placing import bins_of, place
from trl_jax.data.layout.row_view import RowViewShape
from trl_jax.data.layout.sharded import by_shard, in_shards, packed_passes, pass_weights, room, sharded_rows

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
