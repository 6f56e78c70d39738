"""Which layout a run takes and which lengths its streams have: from how long the pairs are. Pure NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from trl_jax.core.packed import BLOCK
from trl_jax.data.layout.packed import greedy_bins
from trl_jax.data.rows.checks import IDS, blocks, list_lengths

LAYOUTS = ("padded", "packed", "shared")
SURVEYED = 16_384  # pairs that are looked at, those of several epochs where there are fewer
_EPOCHS = 8  # at most
EARLY = 100  # steps in which a run compiles
_PLACE = 0.1  # what a token's place in a row costs of what the token does: it is copied there and back, not computed
_LEAST_ROW = 256


@dataclass(frozen=True)
class Buckets:
    """The lengths that streams may have. Each compiles once.

    Beyond the last of `rungs`, or without any, rungs are 128 tokens apart and from about 2,000 on 6 %. `ready` says of
    each rung from which step of a run on it serves, where that is not the first.
    """

    buckets: tuple[int, ...] = ()
    ready: tuple[int, ...] = ()

    def __call__(self, tokens: int, step: int = EARLY) -> int:
        """The least rung that `tokens` fit on at this step of a run, or at any where none serves yet."""
        fitting = [number for number, bucket in enumerate(self.buckets) if tokens <= bucket]
        serving = [number for number in fitting if not self.ready or self.ready[number] <= step]
        if fitting:
            return self.buckets[(serving or fitting)[0]]
        bucket = 128
        while bucket < tokens:
            bucket = -(-max(bucket + 128, int(1.06 * bucket)) // 128) * 128
        return bucket


@dataclass(frozen=True)
class Shapes:
    """What a run compiles where texts in streams stand as rows, too: pairs of a stream's length and that of its rows.

    What fits on none of them gets the next rung of `Ladder()`, and rows as long as the next power of two.
    """

    pairs: tuple[tuple[int, int], ...] = ()

    def __call__(self, tokens: int, longest: int) -> tuple[int, int]:
        """The shortest stream that `tokens` fit on, with the shortest rows of such that the `longest` text does."""
        fitting = [pair for pair in self.pairs if tokens <= pair[0] and longest <= pair[1]]
        return min(fitting, default=(Buckets()(tokens), max(_LEAST_ROW, 1 << (longest - 1).bit_length())))


def fitted(lengths: Sequence[int], bucket_cost: int) -> Buckets:
    """The ladder on which streams of these lengths fill the fewest tokens, a further rung counted as `rung_cost`."""
    needed, counts = np.unique(-(-np.asarray(lengths) // BLOCK) * BLOCK, return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])
    cheapest, previous = [0.0], [0]  # of the shortest `end` lengths; and how many of them lie on lower rungs
    for end in range(1, len(needed) + 1):
        costs = [cheapest[at] + (before[end] - before[at]) * needed[end - 1] + bucket_cost for at in range(end)]
        previous.append(int(np.argmin(costs)))
        cheapest.append(min(costs))
    buckets, end = [], len(needed)
    while end:
        buckets.append(int(needed[end - 1]))
        end = previous[end]
    return Buckets(tuple(reversed(buckets)))


@dataclass(frozen=True)
class Survey:
    """Tokens of pairs, in the order they are visited: `[n]` of each text and of what both begin with."""

    chosen: np.ndarray
    rejected: np.ndarray
    shared: np.ndarray

    def visited(self, order: np.ndarray) -> Survey:
        return Survey(self.chosen[order], self.rejected[order], self.shared[order])

    def steps(self, batch_size: int, accumulation: int, layout: str) -> list[tuple[int, int, int, int]]:
        """For each step: tokens of TRL's padded rows, real tokens, tokens of the longest stream, of the longest text.
        """
        alone = self.chosen + self.rejected
        pairs = alone - self.shared if layout == "shared" else alone
        longest, size = np.maximum(self.chosen, self.rejected), batch_size * accumulation
        found = []
        for start in range(0, len(alone), size):
            costs = pairs[start : start + size].tolist()
            filled = np.bincount(greedy_bins(costs, accumulation), costs)
            micro = [longest[at : at + batch_size] for at in range(start, min(start + size, len(alone)), batch_size)]
            padded = sum(2 * len(rows) * int(rows.max()) for rows in micro)
            real, texts = int(alone[start : start + size].sum()), longest[start : start + size]
            found.append((padded, real, int(filled.max()), int(texts.max())))
        return found


def survey(dataset: Dataset, order: np.ndarray) -> Survey:
    """The pairs at these places of a prepared dataset."""
    parts = []
    for _, block in blocks(dataset.select(order[:SURVEYED]), IDS):
        (chosen, of_chosen), (rejected, of_rejected) = (list_lengths(block, column) for column in IDS)
        parts.append((of_chosen, of_rejected, _shared(chosen, of_chosen, rejected, of_rejected)))
    return Survey(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _shared(chosen: np.ndarray, of_chosen: np.ndarray, rejected: np.ndarray, of_rejected: np.ndarray) -> np.ndarray:
    """`data.streams.shared_tokens` of many pairs; ids lie end to end."""
    most = np.minimum(of_chosen, of_rejected) - 1
    starts = np.cumsum(most) - most
    within = np.arange(most.sum()) - np.repeat(starts, most)
    ids, others = (
        ids[np.repeat(np.cumsum(lengths) - lengths, most) + within]
        for ids, lengths in ((chosen, of_chosen), (rejected, of_rejected))
    )
    shared, some = most.copy(), most > 0
    if some.any():
        apart = np.where(ids == others, np.iinfo(np.int64).max, within)
        shared[some] = np.minimum(np.minimum.reduceat(apart, starts[some]), most[some])
    return shared


@dataclass(frozen=True)
class Plan:
    """A layout, the lengths of its streams, and means over steps: tokens that TRL pads to, real ones, computed ones.

    shapes: in place of the ladder where texts in streams stand as rows, too.
    """

    layout: str
    buckets: Buckets = Buckets()
    padded: float = 0.0
    real: float = 0.0
    computed: float = 0.0
    shapes: Shapes | None = None


def _settled(buckets: Buckets, lengths: Sequence[int]) -> Buckets:
    """Without rungs that no early step takes, so that none compiles late; the last one stays whatever."""
    early = {buckets(int(length)) for length in lengths[:EARLY]} | {*buckets.buckets[-1:]}
    return Buckets(tuple(bucket for bucket in buckets.buckets if bucket in early))


def _served(buckets: Buckets, lengths: Sequence[int], bucket_cost: int, at_once: int) -> Buckets:
    """The ladder of a run that compiles beside its steps, `at_once` rungs in the order in which they are asked for.

    Until one is made, the next longer one serves. When that is comes from the count of tokens and not from a clock, so
    that a run's numbers are the same each time, and from a checkpoint on, too.
    """
    wanted = [buckets(int(length)) for length in lengths[:EARLY]]
    before, ready = np.cumsum([0, *wanted]), {}
    for number, bucket in enumerate(dict.fromkeys(wanted)):
        ready[bucket] = min(EARLY, int(np.searchsorted(before, number // at_once * bucket_cost)))
    for step, bucket in enumerate(wanted):
        if not any(longer >= bucket and ready[longer] <= step for longer in ready):
            ready[bucket] = step  # the device waits for it
    return Buckets(buckets.buckets, tuple(ready.get(bucket, EARLY) for bucket in buckets.buckets))


def plan_layout(
    dataset: Dataset,
    order_of: Callable[[int], np.ndarray],
    layout: str,
    *,
    batch_size: int,
    accumulation: int,
    bucket_cost: int,
    run_steps: int,
    by_rows: bool = False,
    at_once: int | None = None,
) -> Plan:
    """How steps lie as streams, from those of the first epochs: another order may make a longer one.

    Args:
        order_of: from an epoch to the order of its pairs.
        rung_cost: what a compilation costs, in tokens of a stream.
        run_steps: how many steps the run has, over which that is paid.
        by_rows: texts stand as rows, too.
        at_once: how many programs are made at a time beside the steps; None where steps wait for theirs.
    """
    first = order_of(0)
    known, steps = survey(dataset, first), []
    epochs = max(1, min(_EPOCHS, SURVEYED // len(first)))
    place = np.argsort(first)
    for epoch in range(epochs):
        part = known if epoch == 0 else known.visited(place[order_of(epoch)])
        steps += part.steps(batch_size, accumulation, layout)
    padded, real, lengths, texts = (np.asarray(column) for column in zip(*steps, strict=True))
    shared_cost = int(bucket_cost * len(lengths) / max(1, run_steps))
    buckets = _settled(fitted(lengths, shared_cost), lengths)
    found, shapes = [buckets(int(length)) for length in lengths], None
    if by_rows:
        shapes = _shapes(buckets, lengths, texts, shared_cost, rows=2 * batch_size)
        found = [shapes(*map(int, step))[0] for step in zip(lengths, texts, strict=True)]
    elif at_once is not None:
        buckets = _served(buckets, lengths, bucket_cost, at_once)
    return Plan(layout, buckets, float(padded.mean()), float(real.mean()), float(accumulation * np.mean(found)), shapes)


def _shapes(buckets: Buckets, lengths: Sequence[int], texts: Sequence[int], bucket_cost: int, rows: int) -> Shapes:
    """Those that early steps take, and the largest: a further length of rows may compile with each of the streams'."""
    of_rows = fitted(texts, int(bucket_cost * len(buckets.buckets) / (_PLACE * rows)))
    early = zip(lengths[:EARLY], texts[:EARLY], strict=True)
    pairs = {(buckets(int(length)), of_rows(int(text))) for length, text in early}
    return Shapes(tuple(sorted(pairs | {(buckets.buckets[-1], of_rows.buckets[-1])})))
