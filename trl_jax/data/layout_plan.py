"""Choose the batch layout and the lengths of packed rows from the lengths of the texts. Pure NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from datasets import Dataset

from trl_jax.core.outputs import BLOCK
from trl_jax.data.checks import blocks, list_lengths
from trl_jax.data.packed import greedy_bins

# ----------------------------------------------------------------------------------------------------
# Bucket lengths: the few lengths that packed rows, and texts viewed as rows, may have. Pure NumPy.


EARLY = 100  # steps in which a run compiles
_LEAST_ROW = 256
_LONGEST_ROUND = 2048
_ONE_IN = 4  # of round lengths, how many are taken for each that spares a later run a compilation


@dataclass(frozen=True)
class Buckets:
    """The lengths that packed rows may have. Each compiles once.

    Beyond the last of `lengths`, or without any, lengths are 128 tokens apart and from about 2,000 on 6 %.
    `serves_from` says of each length from which step of a run on it serves, where that is not the first.
    """

    lengths: tuple[int, ...] = ()
    serves_from: tuple[int, ...] = ()

    def __call__(self, tokens: int, step: int = EARLY) -> int:
        """The least length that `tokens` fit on at this step of a run, or at any where none serves yet."""
        fitting = [number for number, length in enumerate(self.lengths) if tokens <= length]
        serving = [number for number in fitting if not self.serves_from or self.serves_from[number] <= step]
        if fitting:
            return self.lengths[(serving or fitting)[0]]
        length = 128
        while length < tokens:
            length = -(-max(length + 128, int(1.06 * length)) // 128) * 128
        return length


@dataclass(frozen=True)
class ViewBuckets:
    """The shapes that a run compiles where texts in packed rows are viewed as rows, too.

    Each of `shapes` is (length of packed rows, length of rows). What fits on none of them gets the next length of
    `Buckets()`, and rows as long as the next power of two.
    """

    shapes: tuple[tuple[int, int], ...] = ()

    def __call__(self, tokens: int, longest: int) -> tuple[int, int]:
        """The shortest packed row that `tokens` fit on, with the shortest rows of such that the `longest` text does."""
        fitting = [shape for shape in self.shapes if tokens <= shape[0] and longest <= shape[1]]
        return min(fitting, default=(Buckets()(tokens), max(_LEAST_ROW, 1 << (longest - 1).bit_length())))


def fitted(lengths: Sequence[int], bucket_cost: int) -> Buckets:
    """The buckets on which packed rows of these lengths fill the fewest tokens, a further one counted as
    `bucket_cost`."""
    needed, counts = np.unique(-(-np.asarray(lengths) // BLOCK) * BLOCK, return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])
    cheapest, previous = [0.0], [0]  # of the shortest `end` lengths; and how many of them lie in lower buckets
    for end in range(1, len(needed) + 1):
        costs = [cheapest[at] + (before[end] - before[at]) * needed[end - 1] + bucket_cost for at in range(end)]
        previous.append(int(np.argmin(costs)))
        cheapest.append(min(costs))
    lengths, end = [], len(needed)
    while end:
        lengths.append(int(needed[end - 1]))
        end = previous[end]
    return Buckets(tuple(reversed(lengths)))


def rounded(buckets: Buckets, lengths: Sequence[int], bucket_cost: int) -> Buckets:
    """The buckets, each as long as the next power of two or three times one where that fills few tokens beside a
    compilation: a run of other texts then finds this one's programs. Long rows take memory and stay as they are."""
    taken = np.bincount(np.searchsorted(buckets.lengths, lengths), minlength=len(buckets.lengths))
    rounder = [_round(length) for length in buckets.lengths]
    every = zip(buckets.lengths, rounder, taken, strict=True)
    return Buckets(tuple(sorted({
        longer if count * (longer - length) * _ONE_IN <= bucket_cost else length for length, longer, count in every
    })))  # fmt: skip


def _round(length: int) -> int:
    if length > _LONGEST_ROUND:
        return length
    power = 1 << (length - 1).bit_length()
    return power * 3 // 4 if length <= power * 3 // 4 and power * 3 // 4 % BLOCK == 0 else power


def without_late(buckets: Buckets, lengths: Sequence[int]) -> Buckets:
    """The buckets that early steps take, so that none compiles late; the last one stays whatever."""
    early = {buckets(int(length)) for length in lengths[:EARLY]} | {*buckets.lengths[-1:]}
    return Buckets(tuple(length for length in buckets.lengths if length in early))


def compiled_while_training(buckets: Buckets, lengths: Sequence[int], bucket_cost: int, at_once: int) -> Buckets:
    """The buckets of a run that compiles beside its steps, `at_once` of them in the order in which they are asked for.

    Until one is compiled, the next longer one serves. When that is comes from the count of tokens and not from a clock,
    so that a run's numbers are the same each time, and from a checkpoint on, too.
    """
    wanted = [buckets(int(length)) for length in lengths[:EARLY]]
    before, serves_from = np.cumsum([0, *wanted]), {}
    for number, length in enumerate(dict.fromkeys(wanted)):
        serves_from[length] = min(EARLY, int(np.searchsorted(before, number // at_once * bucket_cost)))
    for step, length in enumerate(wanted):
        if not any(longer >= length and serves_from[longer] <= step for longer in serves_from):
            serves_from[length] = step  # the device waits for it
    return Buckets(buckets.lengths, tuple(serves_from.get(length, EARLY) for length in buckets.lengths))


# ----------------------------------------------------------------------------------------------------
# Which layout a run takes and which lengths its packed rows have: from how long the texts are. Pure NumPy.


_EPOCHS = 8  # at most
_PLACE = 0.1  # what a token's place in a row costs of what the token does: it is copied there and back, not computed


@dataclass(frozen=True)
class LayoutPlan:
    """A layout, the lengths of its packed rows, and means over steps: tokens that TRL pads to, real, computed ones.

    views: in place of the buckets where texts in packed rows are viewed as rows, too.
    """

    layout: str
    buckets: Buckets = Buckets()
    padded: float = 0.0
    real: float = 0.0
    computed: float = 0.0
    views: ViewBuckets | None = None


def plan_layout(
    dataset: Dataset,
    columns: tuple[str, ...],
    order_of: Callable[[int], np.ndarray],
    layout: str,
    *,
    batch_size: int,
    accumulation: int,
    bucket_cost: int,
    run_steps: int,
    by_micro_batch: bool = False,
    by_rows: bool = False,
    at_once: int | None = None,
    documents: str | None = None,
    virtual: int = 0,
) -> LayoutPlan:
    """How steps lie as packed rows, from those of the first epochs: another order may make a longer one.

    Args:
        columns: the token columns of the dataset, a text each.
        order_of: from an epoch to the order of its examples.
        bucket_cost: what a compilation costs, in tokens of a packed row.
        run_steps: how many steps the run has, over which that is paid.
        by_micro_batch: whether each micro-batch has a packed row to itself.
        by_rows: texts are viewed as rows, too.
        at_once: how many programs are compiled at a time beside the steps; None where steps wait for theirs.
        documents, virtual: as of `survey`.
    """
    first = order_of(0)
    known, steps = survey(dataset, first, columns, documents, virtual), []
    epochs = max(1, min(_EPOCHS, SURVEYED // len(first)))
    place = np.argsort(first)
    for epoch in range(epochs):
        part = known if epoch == 0 else known.visited(place[order_of(epoch)])
        steps += part.steps(batch_size, accumulation, layout, by_micro_batch=by_micro_batch)
    padded, real, lengths, texts = (np.asarray(column) for column in zip(*steps, strict=True))
    cost = int(bucket_cost * len(lengths) / max(1, run_steps))
    buckets = rounded(without_late(fitted(lengths, cost), lengths), lengths, cost)
    found, views = [buckets(int(length)) for length in lengths], None
    if by_rows:
        views = _views(buckets, lengths, texts, cost, rows=len(columns) * batch_size)
        found = [views(*map(int, step))[0] for step in zip(lengths, texts, strict=True)]
    elif at_once is not None:
        buckets = compiled_while_training(buckets, lengths, bucket_cost, at_once)
    computed = float(accumulation * np.mean(found))
    return LayoutPlan(layout, buckets, float(padded.mean()), float(real.mean()), computed, views)


def _views(buckets: Buckets, lengths: Sequence[int], texts: Sequence[int], bucket_cost: int, rows: int) -> ViewBuckets:
    """Those that early steps take, and the largest: a further length of rows may compile with each packed row's."""
    of_rows = fitted(texts, int(bucket_cost * len(buckets.lengths) / (_PLACE * rows)))
    early = zip(lengths[:EARLY], texts[:EARLY], strict=True)
    shapes = {(buckets(int(length)), of_rows(int(text))) for length, text in early}
    return ViewBuckets(tuple(sorted(shapes | {(buckets.lengths[-1], of_rows.lengths[-1])})))


# ----------------------------------------------------------------------------------------------------
# How long the texts of a dataset are, and how much of them is shared. Pure NumPy.


SURVEYED = 16_384  # examples that are looked at, those of several epochs where there are fewer


class StepSize(NamedTuple):
    """Tokens of one step: `padded` as TRL pads its rows, `real`, of the longest packed row, of the longest text."""

    padded: int
    real: int
    packed: int
    text: int


@dataclass(frozen=True)
class Survey:
    """Tokens of examples, in the order they are visited: `[n, texts]` of each text, `[n]` of what two share."""

    texts: np.ndarray
    shared: np.ndarray

    def visited(self, order: np.ndarray) -> Survey:
        return Survey(self.texts[order], self.shared[order])

    def steps(self, batch_size: int, accumulation: int, layout: str, *, by_micro_batch: bool = False) -> list[StepSize]:
        """The sizes of each step.

        Args:
            by_micro_batch: whether each micro-batch has a packed row to itself.
        """
        alone, longest = self.texts.sum(axis=1), self.texts.max(axis=1)
        costs, size = alone - self.shared if layout == "shared" else alone, batch_size * accumulation
        found = []
        for start in range(0, len(alone), size):
            own = costs[start : start + size].tolist()
            into = np.arange(len(own)) // batch_size if by_micro_batch else greedy_bins(own, accumulation)
            filled = np.bincount(into, own)
            micro = [longest[at : at + batch_size] for at in range(start, min(start + size, len(alone)), batch_size)]
            padded = sum(self.texts.shape[1] * len(rows) * int(rows.max()) for rows in micro)
            real, texts = int(alone[start : start + size].sum()), longest[start : start + size]
            found.append(StepSize(padded, real, int(filled.max()), int(texts.max())))
        return found


def survey(
    dataset: Dataset, order: np.ndarray, columns: tuple[str, ...], documents: str | None = None, virtual: int = 0
) -> Survey:
    """The examples at these places of a prepared dataset, whose texts are these columns of token ids.

    Args:
        documents: the column of lengths of the documents of the one text; a dataset may lack it.
        virtual: tokens that stand before each text, or document, beside its own.
    """
    lengths, shared, documents = [], [], documents if documents in dataset.column_names else None
    for _, block in blocks(dataset.select(order[:SURVEYED]), columns if documents is None else (*columns, documents)):
        texts = [list_lengths(block, column) for column in columns]
        parts = 1 if documents is None else list_lengths(block, documents)[1][:, None]
        lengths.append(np.stack([of_text for _, of_text in texts], axis=1) + virtual * parts)
        shared.append(_shared(*texts) + virtual if len(texts) == 2 else np.zeros(block.num_rows, np.int64))
    return Survey(np.concatenate(lengths), np.concatenate(shared))


def _shared(first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """`data.layout.placing.shared_tokens` of many examples; each text is (ids end to end, how many each row has)."""
    most = np.minimum(first[1], second[1]) - 1
    starts = np.cumsum(most) - most
    within = np.arange(most.sum()) - np.repeat(starts, most)
    ids, others = (ids[np.repeat(np.cumsum(lengths) - lengths, most) + within] for ids, lengths in (first, second))
    shared, some = most.copy(), most > 0
    if some.any():
        apart = np.where(ids == others, np.iinfo(np.int64).max, within)
        shared[some] = np.minimum(np.minimum.reduceat(apart, starts[some]), most[some])
    return shared
