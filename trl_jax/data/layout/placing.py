"""The places of a step's examples in packed rows: in which one each lies, and what it shares there. Pure NumPy."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from trl_jax.data.example import Example, weight_of


class Placed(NamedTuple):
    """An example with its slot, counted over the step's micro-batches, its weight, how many tokens its two texts share,
    and the micro-batch and key of the context that it shares with other examples."""

    slot: int
    example: Example
    weight: float
    shared: int
    context: Hashable = None

    @property
    def tokens(self) -> int:
        """Places that it takes in a packed row, its context with it."""
        return self.example.tokens - self.shared

    @property
    def context_tokens(self) -> int:
        """Those of its context, which stand in a packed row once."""
        return 0 if self.context is None else self.example.context.tokens


def shared_tokens(texts: Sequence[Sequence[int]]) -> int:
    """How many ids two texts begin with alike; each keeps its last one to itself. Others than two share nothing: a
    token sees one run of its row, so a prefix has one text before it and one behind it."""
    if len(texts) != 2:
        return 0
    first, second = texts
    most = min(len(first), len(second)) - 1
    differ = np.flatnonzero(np.asarray(first[:most]) != np.asarray(second[:most]))
    return int(differ[0]) if len(differ) else most


def greedy_bins(
    costs: Sequence[int], bins: int, most: int | None = None, sizes: Sequence[int] | None = None
) -> list[int]:
    """The bin of each item: the dearest first, each into the one that is emptiest then (Graham 1969).

    `most` of the `sizes`, one an item unless they are given, go into one at most; there is room for all. Where sizes
    differ, that is so if they take up half of it, and none more than half of a bin.
    """
    if bins == 1:
        return [0] * len(costs)
    sizes = [1] * len(costs) if sizes is None else sizes
    heap, found = [(0, number) for number in range(bins)], [0] * len(costs)
    free = [sum(sizes) if most is None else most] * bins
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        tight = []
        while free[heap[0][1]] < sizes[item]:
            tight.append(heapq.heappop(heap))
        filled, number = heapq.heappop(heap)
        found[item] = number
        free[number] -= sizes[item]
        for bin_ in (*tight, (filled + costs[item], number)):
            heapq.heappush(heap, bin_)
    return found


def bins_of(placed: Sequence[Placed], bins: int, most: int | None = None) -> list[int]:
    """The packed row of each example, by `greedy_bins`; those that share a context stay together."""
    groups: dict[Hashable, list[int]] = {}
    for number, one in enumerate(placed):
        groups.setdefault(("alone", number) if one.context is None else one.context, []).append(number)
    own = list(groups.values())
    costs = [
        sum(placed[number].tokens for number in group) - (len(group) - 1) * placed[group[0]].context_tokens
        for group in own
    ]
    into = [0] * len(placed)
    for group, row in zip(own, greedy_bins(costs, bins, most, [len(group) for group in own]), strict=True):
        for number in group:
            into[number] = row
    return into


def place(
    micro_batches: Sequence[Sequence[Example]],
    *,
    examples: int,
    share_prefix: bool,
    weights: Sequence[float] | None = None,
) -> list[Placed]:
    """The examples of a step in order; a full micro-batch has `examples`. TRL's mean of means is in their weights,
    unless `weights` has those of each micro-batch's examples, or an example has its own."""
    return [
        Placed(
            m * examples + i,
            example,
            weight_of(example, 1.0 / (len(micro_batches) * len(batch)) if weights is None else weights[m]),
            shared_tokens(example.texts) if share_prefix else 0,
            _context_of(example, m) if share_prefix else None,
        )
        for m, batch in enumerate(micro_batches)
        for i, example in enumerate(batch)
    ]


def _context_of(example: Example, micro_batch: int) -> Hashable:
    """The micro-batch and the key of an example's context, None without one: what a token is computed from may depend
    on the longest text that TRL runs beside it, so examples of other micro-batches have it for themselves.

    Raises:
        ValueError: its text does not begin with as many tokens, or it is not the only one.
    """
    if example.context is None:
        return None
    key, tokens = example.context
    if len(example.texts) != 1 or example.documents or not 0 < tokens <= len(example.texts[0]):
        raise ValueError(
            f"The context {key!r} is the first {tokens} tokens of an example with texts of "
            f"{', '.join(str(len(text)) for text in example.texts)} tokens. An example with a context has one text, of "
            "one document, which begins with it; leave `context` out elsewhere."
        )
    return micro_batch, key


def longest_in_batch(placed: Sequence[Placed], size: int) -> list[int]:
    """For each example the longest document among those that TRL would run beside it: runs of `size` slots."""
    longest: dict[int, int] = {}
    for one in placed:
        longest[one.slot // size] = max(longest.get(one.slot // size, 0), one.example.longest_document)
    return [longest[one.slot // size] for one in placed]
