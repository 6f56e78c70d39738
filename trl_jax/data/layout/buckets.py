"""Bucket lengths: the few lengths that packed rows, and texts viewed as rows, may have. Pure NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trl_jax.core.packed import BLOCK

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
