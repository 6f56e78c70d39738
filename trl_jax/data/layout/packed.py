"""Packed rows: text after text without pads between, and what two texts begin with only once. Pure NumPy."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from trl_jax.core.packed import Packed, RowView
from trl_jax.data.example import Example, weight_of
from trl_jax.data.layout.batch import Batch, empty_extras, read_places


class Placed(NamedTuple):
    """An example with its slot, counted over the step's micro-batches, its weight, and how many tokens are shared."""

    slot: int
    example: Example
    weight: float
    shared: int

    @property
    def tokens(self) -> int:
        """Places that it takes in a packed row."""
        return self.example.tokens - self.shared


class RowViewShape(NamedTuple):
    """How texts in packed rows are viewed as rows, too: of at most `examples` examples. `shape` goes from the tokens of
    the longest packed row, and of the longest text, to the lengths of packed rows and of rows."""

    examples: int
    shape: Callable[[int, int], tuple[int, int]]


class Form(NamedTuple):
    """How packed rows are laid out.

    pad_token_id: fills them, and decides where texts are read.
    share: whether the two texts of an example may share what they begin with.
    bucket: from the tokens of the longest packed row to how long all are.
    row_view: texts stand as rows, too, and lengths are of its `shape`; None where attention goes along the packed row.
    """

    pad_token_id: int
    share: bool
    bucket: Callable[[int], int]
    row_view: RowViewShape | None = None


def shared_tokens(texts: Sequence[Sequence[int]]) -> int:
    """How many ids two texts begin with alike; each keeps its last one to itself. Others than two share nothing: a
    token sees one run of its row, so a prefix has one text before it and one behind it."""
    if len(texts) != 2:
        return 0
    first, second = texts
    most = min(len(first), len(second)) - 1
    differ = np.flatnonzero(np.asarray(first[:most]) != np.asarray(second[:most]))
    return int(differ[0]) if len(differ) else most


def greedy_bins(costs: Sequence[int], bins: int, most: int | None = None) -> list[int]:
    """The bin of each item: the dearest first, each into the one that is emptiest then (Graham 1969).

    `most` items at most go into one; there is room for all then.
    """
    if bins == 1:
        return [0] * len(costs)
    heap, found = [(0, number) for number in range(bins)], [0] * len(costs)
    free = [len(costs) if most is None else most] * bins
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        filled, number = heapq.heappop(heap)
        found[item] = number
        free[number] -= 1
        if free[number]:
            heapq.heappush(heap, (filled + costs[item], number))
    return found


def place(
    micro_batches: Sequence[Sequence[Example]],
    *,
    examples: int,
    share: bool,
    weights: Sequence[float] | None = None,
) -> list[Placed]:
    """The examples of a step in order; a full micro-batch has `examples`. TRL's mean of means is in their weights,
    unless `weights` has those of each micro-batch's examples, or an example has its own."""
    return [
        Placed(
            m * examples + i,
            example,
            weight_of(example, 1.0 / (len(micro_batches) * len(batch)) if weights is None else weights[m]),
            shared_tokens(example.texts) if share else 0,
        )
        for m, batch in enumerate(micro_batches)
        for i, example in enumerate(batch)
    ]


def longest_beside(placed: Sequence[Placed], size: int) -> list[int]:
    """For each example the longest document among those that TRL would run beside it: runs of `size` slots."""
    longest: dict[int, int] = {}
    for one in placed:
        longest[one.slot // size] = max(longest.get(one.slot // size, 0), one.example.longest_document)
    return [longest[one.slot // size] for one in placed]


def pack_examples(
    placed: Sequence[Placed],
    into: Sequence[int],
    form: Form,
    *,
    examples: int,
    count: int,
    rows: int,
    beside: Sequence[int] | None = None,
) -> Batch:
    """Examples as packed rows, `[rows, 1, T]`, with a slot for each of `count * examples` in every one.

    Args:
        placed: what `place` gave.
        into: the packed row of each.
        form: how long rows are, and what stands in them.
        examples: a full micro-batch's.
        count: micro-batches a full step has.
        beside: of each example as `longest_beside` gives it; None means that of micro-batches.
    """
    filled = [sum(one.tokens for one, own in zip(placed, into, strict=True) if own == row) for row in range(rows)]
    view, length, like = None, 0, placed[0].example
    if form.row_view is None:
        length = form.bucket(max(filled))
    else:
        length, text = form.row_view.shape(max(filled), max(one.example.longest_document for one in placed))
        view = _no_view(rows, _view_rows(placed, into, form.row_view), text, length)
    batch = _empty(form, rows, length, count, examples, like, view, _num_reads(placed, into, length))
    beside = longest_beside(placed, examples) if beside is None else beside
    free, taken, read = [0] * rows, [0] * rows, [0] * rows
    for one, row, longest in zip(placed, into, beside, strict=True):
        places = _write(batch, row, free[row], one)
        read[row] = _write_reads(batch, row, read[row], one, places, form.pad_token_id)
        if view is not None:
            runs = [places[0][start:end] for start, end in one.example.spans] if one.example.documents else places
            _write_view(view, row, taken[row], one.shared, runs)
            taken[row] += len(runs)
        end = free[row] + one.tokens
        batch.packed.longest[row, 0, free[row] : end] = longest
        free[row] = end
    return batch


def _empty(
    form: Form, rows: int, length: int, count: int, examples: int, like: Example, view: RowView | None, reads: int
) -> Batch:
    def filled(shape: tuple[int, ...], value: int, dtype: type = np.int32) -> np.ndarray:
        return np.full((rows, *shape), value, dtype)

    slots, targets, text = count * examples, None, None
    reads = reads if like.labels else len(like.texts) * slots
    if like.labels:
        targets, text = filled((reads,), -1), filled((reads,), len(like.texts) * slots)
    member = np.repeat(np.eye(count, dtype=bool), examples, axis=1)
    return Batch(
        tokens=filled((1, length), form.pad_token_id),
        positions=filled((1, length), 0),
        reads=filled((reads,), 0),
        lengths=filled((len(like.texts) * slots,), 1),
        weight=filled((slots,), 0, np.float32),
        micro_batch=np.broadcast_to(member, (rows, *member.shape)),
        extras=empty_extras(like, rows, examples=slots, reads=reads),
        packed=Packed(
            filled((1, length), length),
            filled((1, length), length),
            filled((1, length), 1),
            filled((1, length), length) if form.share and len(like.texts) > 1 else None,
            view,
        ),
        targets=targets,
        text=text,
        counted=filled((1, length), 0, np.int8),
    )


def _num_reads(placed: Sequence[Placed], into: Sequence[int], length: int) -> int:
    """Places for the reads of a packed row with targets: as many as it has tokens, whatever part of them is read, or a
    multiple where texts that share tokens read them twice."""
    targets = np.bincount(into, [one.example.num_targets for one in placed])
    return max(1, -(-int(targets.max()) // length)) * length


def _view_rows(placed: Sequence[Placed], into: Sequence[int], view: RowViewShape) -> int:
    """Rows that the texts of any packed row are viewed as; of documents the next power of two, so that few shapes
    compile."""
    documents = int(np.bincount(into, [len(one.example.documents) for one in placed]).max())
    return 1 << (documents - 1).bit_length() if documents else len(placed[0].example.texts) * view.examples


def _no_view(rows: int, count: int, longest: int, length: int) -> RowView:
    places = np.full((rows, 1, count, longest), length, np.int32)
    return RowView(places, np.full((rows, 1, 2, length), count * longest, np.int32))


def _places(texts: Sequence[Sequence[int]], start: int, shared: int) -> list[np.ndarray]:
    """Where each text's tokens stand, in order. Of two that share what they begin with, the first has its own end
    before that, from its last token to its first, and the second behind it."""
    if not shared:
        ends = start + np.cumsum([len(ids) for ids in texts])
        return [np.arange(end - len(ids), end) for ids, end in zip(texts, ends, strict=True)]
    first, second = texts
    begin, branch = start + len(first) - shared, start + len(first)
    of_first = np.concatenate([np.arange(begin, branch), np.arange(begin - 1, start - 1, -1)])
    return [of_first, np.concatenate([of_first[:shared], np.arange(branch, branch + len(second) - shared)])]


def _write(batch: Batch, row: int, start: int, one: Placed) -> list[np.ndarray]:
    """Lay an example into a packed row from `start` on. Returns where each text's tokens are."""
    texts = one.example.texts
    places = _places(texts, start, one.shared)
    tokens, positions, packed = batch.tokens[row, 0], batch.positions[row, 0], batch.packed
    first, end = packed.first[row, 0], packed.end[row, 0]
    for ids, at in reversed(list(zip(texts, places, strict=True))):
        tokens[at] = ids
        for begin, stop in one.example.spans if one.example.documents else [(0, len(ids))]:
            run = at[begin:stop]
            positions[run], first[run], end[run] = np.arange(stop - begin), run[0], run + 1
            if packed.prompt is not None:
                packed.prompt[row, 0, run] = run[0]
    for at in places[: one.example.counted]:
        batch.counted[row, 0, at] += 1
    if one.shared:  # the first text's own tokens see from themselves to the end of what is shared
        own = places[0][one.shared :]
        first[own], end[own] = own, places[0][0] + one.shared
    batch.enter((row,), one.slot, one.example, one.weight)
    return places


def _write_reads(
    batch: Batch, row: int, read: int, one: Placed, places: list[np.ndarray], pad_token_id: int
) -> int:
    """Enter the reads of an example, those of targets from `read` on. Returns their end.

    A text that is the same as the first one is read at one place with it: sums in another order would tell them apart,
    as TRL does not.
    """
    texts, slots = one.example.texts, batch.weight.shape[1]
    for number, (ids, at) in enumerate(zip(texts, places, strict=True)):
        slot = number * slots + one.slot
        at = (places[0] if np.array_equal(texts[0], ids) else at)[read_places(one.example, number, pad_token_id)]
        batch.lengths[row, slot] = len(ids)
        if one.example.labels:
            read = batch.read((row,), read, one.slot, one.example, number, at)
        else:
            batch.reads[row, slot] = at[0]
    return read


def _write_view(view: RowView, row: int, number: int, shared: int, places: list[np.ndarray]) -> None:
    """The rows, from this number on, of an example in its packed row, from where each text's tokens are."""
    at_view, back = view.places[row, 0], view.rows[row, 0]
    for text, at in enumerate(places):
        own = (number + text) * at_view.shape[1] + np.arange(len(at))
        at_view.reshape(-1)[own] = at
        begin = shared if text else 0  # what is shared is in the first text's row, and in the second's as the other
        back[0, at[begin:]] = own[begin:]
        back[1, at[:begin]] = own[:begin]
