"""Pairs in streams: text after text without pads between, and what both answers begin with only once. Pure NumPy."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from trl_jax.core.packed import Packed, RowView
from trl_jax.data.layout.batch import PairBatch, scored_token


class Placed(NamedTuple):
    """A pair: its slot, counted over the step's micro-batches, its weight, and how many tokens are shared."""

    slot: int
    row: dict
    weight: float
    shared: int

    @property
    def tokens(self) -> int:
        return len(self.row["chosen_ids"]) + len(self.row["rejected_ids"]) - self.shared

    @property
    def longest(self) -> int:
        """Of its two texts."""
        return max(len(self.row["chosen_ids"]), len(self.row["rejected_ids"]))


class Rows(NamedTuple):
    """How a stream's texts stand as rows, too: of at most `pairs` pairs; `shape` is from the tokens of the longest
    stream, and of the longest text, to the lengths of streams and of rows."""

    pairs: int
    shape: Callable[[int, int], tuple[int, int]]


class Form(NamedTuple):
    """How streams are laid out.

    Attributes:
        pad_token_id: fills them, and decides where texts are read.
        share: whether pairs may share what they begin with.
        rung: from the tokens of the longest stream to how long all are.
        rows: texts stand as rows, too, and lengths are of its `shape`; None where attention goes along the stream.
    """

    pad_token_id: int
    share: bool
    bucket: Callable[[int], int]
    rows: Rows | None = None


def shared_tokens(chosen: Sequence[int], rejected: Sequence[int]) -> int:
    """How many ids both begin with; each keeps its last one to itself."""
    most = min(len(chosen), len(rejected)) - 1
    differ = np.flatnonzero(np.asarray(chosen[:most]) != np.asarray(rejected[:most]))
    return int(differ[0]) if len(differ) else most


def greedy_bins(costs: Sequence[int], streams: int, most: int | None = None) -> list[int]:
    """The stream of each pair: the dearest first, each into what is emptiest then (Graham 1969).

    `most` pairs at most go into one; there is room for all then.
    """
    if streams == 1:
        return [0] * len(costs)
    heap, chosen = [(0, stream) for stream in range(streams)], [0] * len(costs)
    free = [len(costs) if most is None else most] * streams
    for pair in sorted(range(len(costs)), key=lambda pair: -costs[pair]):
        filled, stream = heapq.heappop(heap)
        chosen[pair] = stream
        free[stream] -= 1
        if free[stream]:
            heapq.heappush(heap, (filled + costs[pair], stream))
    return chosen


def place(
    micro_batches: Sequence[Sequence[dict]], *, pairs: int, share: bool, weights: Sequence[float] | None = None
) -> list[Placed]:
    """The pairs of a step in order; a full micro-batch has `pairs`. TRL's mean of means is in their weights, unless
    `weights` has those of each micro-batch's pairs."""
    return [
        Placed(
            m * pairs + i,
            row,
            1.0 / (len(micro_batches) * len(rows)) if weights is None else weights[m],
            shared_tokens(row["chosen_ids"], row["rejected_ids"]) if share else 0,
        )
        for m, rows in enumerate(micro_batches)
        for i, row in enumerate(rows)
    ]


def stream_pairs(
    placed: Sequence[Placed],
    into: Sequence[int],
    form: Form,
    *,
    pairs: int,
    count: int,
    streams: int,
    beside: Sequence[int] | None = None,
) -> PairBatch:
    """Pairs as streams, `[streams, 1, T]`, with a slot for each of `count * pairs` in every one.

    Args:
        placed: what `place` gave.
        into: the stream of each.
        form: how long they are, and what stands in them.
        pairs: a full micro-batch's.
        count: micro-batches a full step has.
        beside: for each pair the longest text that TRL would run beside it; None means that of its micro-batch.
    """
    filled = [sum(pair.tokens for pair, own in zip(placed, into, strict=True) if own == s) for s in range(streams)]
    slots, texts = count * pairs, None
    if form.rows is None:
        length = form.bucket(max(filled))
    else:
        length, row = form.rows.shape(max(filled), max(pair.longest for pair in placed))
        texts = _no_texts(streams, 2 * form.rows.pairs, row, length)
    batch = _empty(form, streams, length, count, pairs, "margin" in placed[0].row, texts)
    if beside is None:
        longest = _longest_by_micro_batch(placed, pairs, count)
        beside = [longest[pair.slot // pairs] for pair in placed]
    free, taken = [0] * streams, [0] * streams
    for pair, own, longest in zip(placed, into, beside, strict=True):
        places = _write(batch, own, free[own], pair, slots, form.pad_token_id)
        if texts is not None:
            _write_rows(texts, own, taken[own], pair.shared, *places)
        taken[own] += 1
        end = free[own] + pair.tokens
        batch.packed.longest[own, 0, free[own] : end] = longest
        free[own] = end
    return batch


def _empty(
    form: Form, streams: int, length: int, count: int, pairs: int, margin: bool, texts: RowView | None
) -> PairBatch:
    def filled(shape: tuple[int, ...], value: int, dtype: type = np.int32) -> np.ndarray:
        return np.full((streams, *shape), value, dtype)

    slots = count * pairs
    member = np.repeat(np.eye(count, dtype=bool), pairs, axis=1)
    return PairBatch(
        tokens=filled((1, length), form.pad_token_id),
        positions=filled((1, length), 0),
        at=filled((2 * slots,), 0),
        lengths=filled((2 * slots,), 1),
        weight=filled((slots,), 0, np.float32),
        member=np.broadcast_to(member, (streams, *member.shape)),
        margin=filled((slots,), 0, np.float32) if margin else None,
        packed=Packed(
            filled((1, length), length),
            filled((1, length), length),
            filled((1, length), 1),
            filled((1, length), length) if form.share else None,
            texts,
        ),
    )


def _no_texts(streams: int, count: int, longest: int, length: int) -> RowView:
    places = np.full((streams, 1, count, longest), length, np.int32)
    return RowView(places, np.full((streams, 1, 2, length), count * longest, np.int32))


def _longest_by_micro_batch(placed: Sequence[Placed], pairs: int, count: int) -> list[int]:
    longest = [0] * count
    for pair in placed:
        longest[pair.slot // pairs] = max(longest[pair.slot // pairs], pair.longest)
    return longest


def _write(
    batch: PairBatch, own: int, start: int, pair: Placed, slots: int, pad_token_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """A pair from `start` on: what the chosen text has of its own from its end, what both begin with, what the rejected
    one has of its own. Where nothing is shared, one text and the other. Returns where each text's tokens are.

    Two texts that are the same are scored at one place: sums in another order would tell them apart, as TRL does not.
    """
    chosen, rejected, shared = pair.row["chosen_ids"], pair.row["rejected_ids"], pair.shared
    forward = shared or len(chosen)  # of the chosen text
    begin, branch = start + len(chosen) - forward, start + len(chosen)
    of_chosen = np.concatenate([np.arange(begin, branch), np.arange(begin - 1, start - 1, -1)])
    of_rejected = np.concatenate([of_chosen[:shared], np.arange(branch, branch + len(rejected) - shared)])
    tokens, positions = batch.tokens[own, 0], batch.positions[own, 0]
    first, end = batch.packed.first[own, 0], batch.packed.end[own, 0]
    for ids, places in ((rejected, of_rejected), (chosen, of_chosen)):
        tokens[places], positions[places] = ids, np.arange(len(ids))
        first[places], end[places] = places[0], places + 1
    first[start:begin], end[start:begin] = np.arange(start, begin), branch
    if batch.packed.prompt is not None:
        batch.packed.prompt[own, 0, start : of_rejected[-1] + 1] = begin
        batch.packed.prompt[own, 0, branch : of_rejected[-1] + 1] = of_rejected[0]
    batch.at[own, pair.slot] = of_chosen[scored_token(chosen, pad_token_id)]
    read = of_chosen if np.array_equal(chosen, rejected) else of_rejected
    batch.at[own, slots + pair.slot] = read[scored_token(rejected, pad_token_id)]
    batch.lengths[own, pair.slot], batch.lengths[own, slots + pair.slot] = len(chosen), len(rejected)
    batch.weight[own, pair.slot] = pair.weight
    if batch.margin is not None:
        batch.margin[own, pair.slot] = pair.row["margin"]
    return of_chosen, of_rejected


def _write_rows(
    texts: RowView, own: int, number: int, shared: int, of_chosen: np.ndarray, of_rejected: np.ndarray
) -> None:
    """The rows of a stream's pair of this number, from where its texts' tokens are."""
    places, rows = texts.places[own, 0], texts.rows[own, 0]
    chosen, rejected = (
        (2 * number + side) * places.shape[1] + np.arange(len(at)) for side, at in enumerate((of_chosen, of_rejected))
    )
    places.reshape(-1)[chosen], places.reshape(-1)[rejected] = of_chosen, of_rejected
    rows[0, of_chosen], rows[0, of_rejected[shared:]] = chosen, rejected[shared:]
    rows[1, of_rejected[:shared]] = rejected[:shared]
