"""Which layout a run takes and which lengths its streams have: from how long the pairs are. Pure NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from trl_jax.core.stream import BLOCK
from trl_jax.data.checks import IDS, blocks, list_lengths
from trl_jax.data.streams import balanced

LAYOUTS = ("padded", "packed", "shared")
SURVEYED = 16_384  # pairs that are looked at, those of several epochs where there are fewer
_EPOCHS = 8  # at most
EARLY = 100  # steps in which a run compiles
_PLACE = 0.1  # what a token's place in a row costs of what the token does: it is copied there and back, not computed
_LEAST_ROW = 256


@dataclass(frozen=True)
class Ladder:
    """The lengths that streams may have. Each compiles once.

    Beyond the last of `rungs`, or without any, rungs are 128 tokens apart and from about 2,000 on 6 %. `ready` says of
    each rung from which step of a run on it serves, where that is not the first.
    """

    rungs: tuple[int, ...] = ()
    ready: tuple[int, ...] = ()

    def __call__(self, tokens: int, step: int = EARLY) -> int:
        """The least rung that `tokens` fit on at this step of a run, or at any where none serves yet."""
        fitting = [number for number, rung in enumerate(self.rungs) if tokens <= rung]
        serving = [number for number in fitting if not self.ready or self.ready[number] <= step]
        if fitting:
            return self.rungs[(serving or fitting)[0]]
        rung = 128
        while rung < tokens:
            rung = -(-max(rung + 128, int(1.06 * rung)) // 128) * 128
        return rung


@dataclass(frozen=True)
class Shapes:
    """What a run compiles where texts in streams stand as rows, too: pairs of a stream's length and that of its rows.

    What fits on none of them gets the next rung of `Ladder()`, and rows as long as the next power of two.
    """

    pairs: tuple[tuple[int, int], ...] = ()

    def __call__(self, tokens: int, longest: int) -> tuple[int, int]:
        """The shortest stream that `tokens` fit on, with the shortest rows of such that the `longest` text does."""
        fitting = [pair for pair in self.pairs if tokens <= pair[0] and longest <= pair[1]]
        return min(fitting, default=(Ladder()(tokens), max(_LEAST_ROW, 1 << (longest - 1).bit_length())))


def fitted(lengths: Sequence[int], rung_cost: int) -> Ladder:
    """The ladder on which streams of these lengths fill the fewest tokens, a further rung counted as `rung_cost`."""
    needed, counts = np.unique(-(-np.asarray(lengths) // BLOCK) * BLOCK, return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])
    cheapest, previous = [0.0], [0]  # of the shortest `end` lengths; and how many of them lie on lower rungs
    for end in range(1, len(needed) + 1):
        costs = [cheapest[at] + (before[end] - before[at]) * needed[end - 1] + rung_cost for at in range(end)]
        previous.append(int(np.argmin(costs)))
        cheapest.append(min(costs))
    rungs, end = [], len(needed)
    while end:
        rungs.append(int(needed[end - 1]))
        end = previous[end]
    return Ladder(tuple(reversed(rungs)))


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
            filled = np.bincount(balanced(costs, accumulation), costs)
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
    ladder: Ladder = Ladder()
    padded: float = 0.0
    real: float = 0.0
    computed: float = 0.0
    shapes: Shapes | None = None


def _settled(ladder: Ladder, lengths: Sequence[int]) -> Ladder:
    """Without rungs that no early step takes, so that none compiles late; the last one stays whatever."""
    early = {ladder(int(length)) for length in lengths[:EARLY]} | {*ladder.rungs[-1:]}
    return Ladder(tuple(rung for rung in ladder.rungs if rung in early))


def _served(ladder: Ladder, lengths: Sequence[int], rung_cost: int, at_once: int) -> Ladder:
    """The ladder of a run that compiles beside its steps, `at_once` rungs in the order in which they are asked for.

    Until one is made, the next longer one serves. When that is comes from the count of tokens and not from a clock, so
    that a run's numbers are the same each time, and from a checkpoint on, too.
    """
    wanted = [ladder(int(length)) for length in lengths[:EARLY]]
    before, ready = np.cumsum([0, *wanted]), {}
    for number, rung in enumerate(dict.fromkeys(wanted)):
        ready[rung] = min(EARLY, int(np.searchsorted(before, number // at_once * rung_cost)))
    for step, rung in enumerate(wanted):
        if not any(longer >= rung and ready[longer] <= step for longer in ready):
            ready[rung] = step  # the device waits for it
    return Ladder(ladder.rungs, tuple(ready.get(rung, EARLY) for rung in ladder.rungs))


def plan_layout(
    dataset: Dataset,
    order_of: Callable[[int], np.ndarray],
    layout: str,
    *,
    batch_size: int,
    accumulation: int,
    rung_cost: int,
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
    shared_cost = int(rung_cost * len(lengths) / max(1, run_steps))
    ladder = _settled(fitted(lengths, shared_cost), lengths)
    found, shapes = [ladder(int(length)) for length in lengths], None
    if by_rows:
        shapes = _shapes(ladder, lengths, texts, shared_cost, rows=2 * batch_size)
        found = [shapes(*map(int, step))[0] for step in zip(lengths, texts, strict=True)]
    elif at_once is not None:
        ladder = _served(ladder, lengths, rung_cost, at_once)
    return Plan(layout, ladder, float(padded.mean()), float(real.mean()), float(accumulation * np.mean(found)), shapes)


def _shapes(ladder: Ladder, lengths: Sequence[int], texts: Sequence[int], rung_cost: int, rows: int) -> Shapes:
    """Those that early steps take, and the largest: a further length of rows may compile with each of the streams'."""
    of_rows = fitted(texts, int(rung_cost * len(ladder.rungs) / (_PLACE * rows)))
    early = zip(lengths[:EARLY], texts[:EARLY], strict=True)
    pairs = {(ladder(int(length)), of_rows(int(text))) for length, text in early}
    return Shapes(tuple(sorted(pairs | {(ladder.rungs[-1], of_rows.rungs[-1])})))
