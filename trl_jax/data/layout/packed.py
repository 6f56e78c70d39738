"""Packed rows: text after text without pads between, and what several texts begin with only once. Pure NumPy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from trl_jax.core.packed import Packed, RowView
from trl_jax.data.example import Example
from trl_jax.data.layout.batch import Batch, empty_extras, read_places
from trl_jax.data.layout.placing import Placed, longest_in_batch
from trl_jax.data.layout.row_view import RowViewShape, no_view, sharing, view_rows, write_view


class PackingSpec(NamedTuple):
    """How packed rows are laid out.

    pad_token_id: fills them, and decides where texts are read.
    share_prefix: whether the two texts of an example may share what they begin with, and examples their context.
    bucket: from the tokens of the longest packed row to how long all are.
    row_view: texts stand as rows, too, and lengths are of its `shape`; None where attention goes along the packed row.
    """

    pad_token_id: int
    share_prefix: bool
    bucket: Callable[[int], int]
    row_view: RowViewShape | None = None


def pack_examples(
    placed: Sequence[Placed],
    into: Sequence[int],
    spec: PackingSpec,
    *,
    examples: int,
    count: int,
    rows: int,
    longest_texts: Sequence[int] | None = None,
) -> Batch:
    """Examples as packed rows, `[rows, 1, T]`, with a slot for each of `count * examples` in every one.

    Args:
        placed: what `place` gave.
        into: the packed row of each.
        spec: how long rows are, and what stands in them.
        examples: a full micro-batch's.
        count: micro-batches a full step has.
        longest_texts: of each example as `longest_in_batch` gives it; None means that of micro-batches.
    """
    filled = _filled(placed, into, rows)
    view, length, like = None, 0, placed[0].example
    if spec.row_view is None:
        length = spec.bucket(max(filled))
    else:
        length, text = spec.row_view.shape(max(filled), max(one.example.longest_document for one in placed))
        view = no_view(rows, view_rows(placed, into, spec.row_view), text, length, sharing(placed, into))
    branches = any(one.context is not None for one in placed)
    batch = _empty(spec, rows, length, count, examples, like, view, _num_reads(placed, into, length), branches)
    longest_texts = longest_in_batch(placed, examples) if longest_texts is None else longest_texts
    free, taken, read = [0] * rows, [0] * rows, [0] * rows
    contexts: dict[Hashable, list[np.ndarray]] = {}
    for one, row, longest in zip(placed, into, longest_texts, strict=True):
        before = contexts.setdefault((row, one.context), [])
        branch = 0 if one.context is None else len(before)
        if one.context is None:
            places = _write(batch, row, free[row], one)
        else:
            places = _write_branch(batch, row, free[row], one, before[0] if before else None)
        read[row] = _write_reads(batch, row, read[row], one, places, spec.pad_token_id)
        if view is not None:
            runs = [places[0][start:end] for start, end in one.example.spans] if one.example.documents else places
            for text, at in enumerate(runs):
                shared, side = (one.shared, text) if one.context is None else (one.context_tokens, branch)
                write_view(view, row, taken[row] + text, at, shared if side else 0, side)
            taken[row] += len(runs)
        before.append(places[0][: one.context_tokens])
        end = max(free[row], *(1 + int(at.max()) for at in places))
        batch.packed.longest[row, 0, free[row] : end] = longest
        free[row] = end
    return batch


def _empty(
    spec: PackingSpec,
    rows: int,
    length: int,
    count: int,
    examples: int,
    like: Example,
    view: RowView | None,
    reads: int,
    branches: bool,
) -> Batch:
    def filled(shape: tuple[int, ...], value: int, dtype: type = np.int32) -> np.ndarray:
        return np.full((rows, *shape), value, dtype)

    slots, targets, text = count * examples, None, None
    reads = reads if like.labels else len(like.texts) * slots
    if like.labels:
        targets, text = filled((reads,), -1), filled((reads,), len(like.texts) * slots)
    member = np.repeat(np.eye(count, dtype=bool), examples, axis=1)
    return Batch(
        tokens=filled((1, length), spec.pad_token_id),
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
            filled((1, length), length) if spec.share_prefix and len(like.texts) > 1 else None,
            view,
            *(filled((1, length), length) for _ in range(2) if branches),
        ),
        targets=targets,
        text=text,
        router_token_count=filled((1, length), 0, np.int16),
    )


def _num_reads(placed: Sequence[Placed], into: Sequence[int], length: int) -> int:
    """Places for the reads of a packed row with targets: as many as it has tokens, whatever part of them is read, or a
    multiple where texts that share tokens read them twice."""
    targets = np.bincount(into, [one.example.num_targets for one in placed])
    return max(1, -(-int(targets.max()) // length)) * length


def _filled(placed: Sequence[Placed], into: Sequence[int], rows: int) -> list[int]:
    """The tokens of each packed row: contexts count once in it."""
    filled, met = [0] * rows, set()
    for one, row in zip(placed, into, strict=True):
        known = one.context is not None and (row, one.context) in met
        filled[row] += one.tokens - (one.context_tokens if known else 0)
        met.add((row, one.context))
    return filled


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
    for at in places[: one.example.num_primary_texts]:
        batch.router_token_count[row, 0, at] += 1
    if one.shared:  # the first text's own tokens see from themselves to the end of what is shared
        own = places[0][one.shared :]
        first[own], end[own] = own, places[0][0] + one.shared
    batch.enter((row,), one.slot, one.example, one.weight)
    return places


def _write_branch(batch: Batch, row: int, start: int, one: Placed, context: np.ndarray | None) -> list[np.ndarray]:
    """Lay an example from `start` on, behind its context. Returns where the text's tokens are.

    Args:
        context: where the context is, if the packed row has it already; otherwise it is laid at `start`.

    Raises:
        ValueError: the context has other tokens than under the same key before.
    """
    [ids], shared = one.example.texts, one.context_tokens
    tokens, positions, packed = batch.tokens[row, 0], batch.positions[row, 0], batch.packed
    if context is None:
        context, start = np.arange(start, start + shared), start + shared
        tokens[context] = ids[:shared]
    elif not np.array_equal(tokens[context], ids[:shared]):
        raise ValueError(
            f"Two examples have a context of the key {one.example.context.key!r}, and their texts begin differently. "
            "Give each context a key of its own."
        )
    own = np.arange(start, start + len(ids) - shared)
    at = np.concatenate([context, own])
    tokens[own], positions[at], packed.end[row, 0, at] = ids[shared:], np.arange(len(ids)), at + 1
    packed.first[row, 0, context], packed.first[row, 0, own] = context[0], start
    packed.context[row, 0, own], packed.context_end[row, 0, own] = context[0], context[-1] + 1
    batch.router_token_count[row, 0, at] += len(one.example.texts[: one.example.num_primary_texts])
    batch.enter((row,), one.slot, one.example, one.weight)
    return [at]


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


