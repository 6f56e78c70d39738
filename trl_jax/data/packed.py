"""Batch layouts: padded rows, packed rows with shared prompts, and division over devices. Pure NumPy."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from trl_jax.core.outputs import Packed, RowView
from trl_jax.data.batch import IGNORED, Batch, Example, empty_extras, padded_length, read_places, weight_of
from trl_jax.data.images import PassImages, position_axes

# Several devices: each gets an equal share of every micro-batch, like TRL's ranks


def filled(order: np.ndarray, size: int) -> np.ndarray:
    """Extend the order of an epoch with its first rows to a multiple of `size`, like accelerate's `even_batches`."""
    return np.concatenate([order, np.resize(order, -len(order) % size)])


def by_shard(micro_batches: Sequence[Sequence[Any]], shards: int) -> list[list[Any]]:
    """Split each micro-batch into `shards` consecutive runs. If it is not divisible, some runs have one item more than
    others, and some may be empty."""
    runs = []
    for items in micro_batches:
        ends = [(shard * len(items) + shards - 1) // shards for shard in range(shards + 1)]
        runs += [list(items[start:end]) for start, end in itertools.pairwise(ends)]
    return runs


def room(examples: int, accumulation: int) -> int:
    """Maximum number of examples in a packed row with several devices, whose share of a micro-batch is `examples`.

    Without this bound, every packed row would need slots for all examples of the step.
    """
    return (accumulation + 1) * examples


def step_slots(rows: int, count: int, examples: int) -> np.ndarray:
    """`Batch.micro_batch` of packed rows with a slot for every example of the step: `[rows, count, count * examples]`.

    Args:
        count, examples: micro-batches in a step, and examples in a micro-batch.
    """
    membership = np.repeat(np.eye(count, dtype=bool), examples, axis=1)
    return np.broadcast_to(membership, (rows, *membership.shape))


def row_slots(
    placed: Sequence[Placed], row_of: Sequence[int], *, rows: int, count: int, examples: int, slots: int
) -> tuple[list[Placed], np.ndarray]:
    """Number the examples within each packed row, which then needs fewer slots than the step has examples.

    Args:
        row_of: the packed row of each example.
        count, examples: micro-batches in a step, and examples in a micro-batch, over all shards.
        rows, slots: packed rows, and slots in each.

    Returns:
        The examples with slots within their rows, and `Batch.micro_batch`: `[rows, count, slots]`.
    """
    membership = np.zeros((rows, count, slots), bool)
    num_taken, renumbered = [0] * rows, []
    for entry, row in zip(placed, row_of, strict=True):
        membership[row, entry.slot // examples, num_taken[row]] = True
        renumbered.append(entry._replace(slot=num_taken[row]))
        num_taken[row] += 1
    return renumbered, membership


def sharded_rows(batch: Batch, shards: int) -> Batch:
    """Reshape the padded micro-batches of `by_shard` from `[count x shards, ...]` to `[count, shards, ...]`."""
    passes, _, examples = batch.micro_batch.shape
    membership = batch.micro_batch.reshape(passes, passes // shards, shards, examples).any(axis=2)
    return in_shards(batch._replace(micro_batch=membership), shards)


def in_shards(batch: Batch, shards: int) -> Batch:
    """Reshape every array from `[n x shards, ...]` to `[n, shards, ...]`."""

    def split(leaf: Any) -> Any:
        if isinstance(leaf, dict):
            return {name: split(values) for name, values in leaf.items()}
        if isinstance(leaf, tuple):
            return type(leaf)(*map(split, leaf))
        return None if leaf is None else leaf.reshape(-1, shards, *leaf.shape[1:])

    return split(batch)


def pass_weights(real: np.ndarray) -> np.ndarray:
    """The weight of each example in a mean over passes of each pass's mean over its examples, float32 `[..., E]`.

    Args:
        real: bool `[..., E]`, which examples of each pass are real; empty passes are ignored.
    """
    examples = real.sum(axis=-1, keepdims=True)
    return (real / np.maximum(examples, 1) / np.count_nonzero(examples)).astype(np.float32)


# Packed rows: texts are concatenated without padding, and common prefixes stored once


class RowViewShape(NamedTuple):
    """The shape in which the texts of packed rows are viewed as rows.

    examples: maximum number of examples in a packed row.
    length: tokens per view row.
    """

    examples: int
    length: int


class PackingSpec(NamedTuple):
    """The layout options of packed rows.

    pad_token_id: the padding, which also determines where classifiers read a text.
    share_prefix: whether the two texts of an example share their common prefix, and examples their context.
    length: tokens per packed row, at least `fullest_row`.
    view: also view texts as rows; None if attention runs on packed rows.
    """

    pad_token_id: int
    share_prefix: bool
    length: int
    view: RowViewShape | None = None


def fullest_row(placed: Sequence[Placed], row_of: Sequence[int]) -> int:
    """Number of tokens in the fullest packed row, counting each shared context once.

    Args:
        row_of: the packed row of each example.
    """
    num_tokens, contexts = Counter(), set()
    for entry, row in zip(placed, row_of, strict=True):
        is_stored = entry.context is not None and (row, entry.context) in contexts
        num_tokens[row] += entry.tokens - (entry.context_tokens if is_stored else 0)
        contexts.add((row, entry.context))
    return max(num_tokens.values())


def pack_examples(
    placed: Sequence[Placed],
    row_of: Sequence[int],
    spec: PackingSpec,
    *,
    micro_batch: np.ndarray,
    longest_texts: Sequence[int],
) -> Batch:
    """Lay out examples as packed rows `[rows, 1, T]`.

    Args:
        placed: from `place`, or with slots from `row_slots`.
        row_of: the packed row of each example.
        micro_batch: `Batch.micro_batch` of each row: `[rows, M, slots]`.
        longest_texts: from `longest_in_batch`, for each example.
    """
    batch = _empty_packed(placed, row_of, spec, micro_batch)
    images = PassImages(batch.tokens) if any(entry.example.images for entry in placed) else None
    view = batch.packed.texts
    rows = len(micro_batch)
    end, views, reads = [0] * rows, [0] * rows, [0] * rows  # of each row: tokens, view rows and reads written so far
    contexts: dict[Hashable, list[np.ndarray]] = {}  # (row, context) -> its positions, once per branch
    for entry, row, longest in zip(placed, row_of, longest_texts, strict=True):
        branches = []
        if entry.context is None:
            places = _write(batch, row, end[row], entry)
        else:
            branches = contexts.setdefault((row, entry.context), [])
            places = _write_branch(batch, row, end[row], entry, branches[0] if branches else None)
        if entry.example.images:
            first = images.add(row, entry.example.images, entry.slot if entry.context is None else entry.context)
            for indices, features in zip(places, entry.example.features, strict=True):
                images.write((row, 0, indices), features, first)
        reads[row] = _write_reads(batch, row, reads[row], entry, places, spec.pad_token_id)
        if view is not None:
            views[row] = _write_views(view, row, views[row], entry, places, earlier_branches=len(branches))
        branches.append(places[0][: entry.context_tokens])
        start, end[row] = end[row], max(end[row], *(1 + int(indices.max()) for indices in places))
        batch.packed.longest[row, 0, start : end[row]] = longest
    return batch if images is None else batch._replace(images=images.joined())


def _empty_packed(placed: Sequence[Placed], row_of: Sequence[int], spec: PackingSpec, micro_batch: np.ndarray) -> Batch:
    """A batch of padding, with room for these examples."""
    rows, _, slots = micro_batch.shape
    like, length = placed[0].example, spec.length
    num_texts = len(like.texts) * slots
    num_reads = _num_reads(placed, row_of, length) if like.labels else num_texts
    axes = None
    if any(entry.example.images for entry in placed):
        axes = position_axes(entry.example.positions for entry in placed)

    def full(shape: tuple[int, ...], value: int, dtype: type = np.int32) -> np.ndarray:
        return np.full((rows, *shape), value, dtype)

    shares_prompts = spec.share_prefix and len(like.texts) > 1
    shares_contexts = any(entry.context is not None for entry in placed)
    return Batch(
        tokens=full((1, length), spec.pad_token_id),
        positions=full((1, length) if axes is None else (1, length, axes), 0),
        reads=full((num_reads,), 0),
        lengths=full((num_texts,), 1),
        weight=full((slots,), 0, np.float32),
        micro_batch=micro_batch,
        extras=empty_extras(like, rows, examples=slots, reads=num_reads),
        packed=Packed(
            first=full((1, length), length),
            end=full((1, length), length),
            longest=full((1, length), 1),
            prompt=full((1, length), length) if shares_prompts else None,
            texts=None if spec.view is None else _empty_view(placed, row_of, spec, rows),
            context=full((1, length), length) if shares_contexts else None,
            context_end=full((1, length), length) if shares_contexts else None,
        ),
        targets=full((num_reads,), -1) if like.labels else None,
        text=full((num_reads,), num_texts) if like.labels else None,
        router_token_count=full((1, length), 0, np.int16),
    )


def _empty_view(placed: Sequence[Placed], row_of: Sequence[int], spec: PackingSpec, rows: int) -> RowView:
    count = _num_view_rows(placed, row_of, spec.view.examples)
    indices = np.full((rows, 1, count, spec.view.length), spec.length, np.int32)
    unused = count * spec.view.length
    return RowView(indices, np.full((rows, 1, _max_sharing(placed, row_of), spec.length), unused, np.int32))


def _num_reads(placed: Sequence[Placed], row_of: Sequence[int], length: int) -> int:
    """Number of reads per packed row with targets: the row length, or a multiple of it if texts that share tokens need
    more. It does not depend on the exact number of targets, to limit compilations."""
    targets = np.bincount(row_of, [entry.example.num_targets for entry in placed])
    return max(1, -(-int(targets.max()) // length)) * length


def _places(texts: Sequence[Sequence[int]], start: int, shared: int) -> list[np.ndarray]:
    """The positions of each text's tokens, in order.

    If two texts share a prefix, the rest of the first text precedes the prefix, in reverse order, and the rest of the
    second follows it.
    """
    if not shared:
        ends = start + np.cumsum([len(ids) for ids in texts])
        return [np.arange(end - len(ids), end) for ids, end in zip(texts, ends, strict=True)]
    first, second = texts
    begin, branch = start + len(first) - shared, start + len(first)
    first_indices = np.concatenate([np.arange(begin, branch), np.arange(begin - 1, start - 1, -1)])
    return [first_indices, np.concatenate([first_indices[:shared], np.arange(branch, branch + len(second) - shared)])]


def _write(batch: Batch, row: int, start: int, entry: Placed) -> list[np.ndarray]:
    """Write an example into a packed row at `start`. Returns the positions of each text's tokens."""
    texts = entry.example.texts
    places = _places(texts, start, entry.shared)
    tokens, positions, packed = batch.tokens[row, 0], batch.positions[row, 0], batch.packed
    first, end = packed.first[row, 0], packed.end[row, 0]
    for text, (ids, indices) in reversed(list(enumerate(zip(texts, places, strict=True)))):
        tokens[indices] = ids
        for begin, stop in entry.example.spans_of(ids):
            span = indices[begin:stop]
            positions[span] = entry.example.positions_of(text, begin, stop, _axes(batch))
            first[span], end[span] = span[0], span + 1
            if packed.prompt is not None:
                packed.prompt[row, 0, span] = span[0]
    for indices in places[: entry.example.num_primary_texts]:
        batch.router_token_count[row, 0, indices[: entry.example.num_routed]] += 1
    if entry.shared:  # the first text's own tokens are reversed: each attends up to the end of the shared prefix
        own_indices = places[0][entry.shared :]
        first[own_indices], end[own_indices] = own_indices, places[0][0] + entry.shared
    batch.write_example((row,), entry.slot, entry.example, entry.weight)
    return places


def _axes(batch: Batch) -> int | None:
    """The number of position axes of a batch; None if positions are plain token indices."""
    return batch.positions.shape[-1] if batch.positions.ndim > batch.tokens.ndim else None


def _write_branch(batch: Batch, row: int, start: int, entry: Placed, context: np.ndarray | None) -> list[np.ndarray]:
    """Write an example with a context at `start`. Returns the positions of the text's tokens.

    Args:
        context: positions of the context if the packed row already has it; otherwise it is written at `start`.

    Raises:
        ValueError: the context's tokens differ from those of an earlier one with the same key.
    """
    [ids], shared = entry.example.texts, entry.context_tokens
    tokens, positions, packed = batch.tokens[row, 0], batch.positions[row, 0], batch.packed
    if context is None:
        context, start = np.arange(start, start + shared), start + shared
        tokens[context] = ids[:shared]
    elif not np.array_equal(tokens[context], ids[:shared]):
        raise ValueError(
            f"Two examples have the context key {entry.example.context.key!r} but begin with different tokens. Use a "
            "different key for each context."
        )
    branch = np.arange(start, start + len(ids) - shared)
    indices = np.concatenate([context, branch])
    tokens[branch], packed.end[row, 0, indices] = ids[shared:], indices + 1
    positions[indices] = entry.example.positions_of(0, 0, len(ids), _axes(batch))
    packed.first[row, 0, context], packed.first[row, 0, branch] = context[0], start
    packed.context[row, 0, branch], packed.context_end[row, 0, branch] = context[0], context[-1] + 1
    batch.router_token_count[row, 0, indices[: entry.example.num_routed]] += len(
        entry.example.texts[: entry.example.num_primary_texts]
    )
    batch.write_example((row,), entry.slot, entry.example, entry.weight)
    return [indices]


def _write_reads(batch: Batch, row: int, read: int, entry: Placed, places: list[np.ndarray], pad_token_id: int) -> int:
    """Write the reads of an example; reads of targets start at `read`. Returns the end.

    A text identical to the first one is read at the same positions. Otherwise a different summation order would make
    their outputs differ, unlike in TRL.
    """
    texts, slots = entry.example.texts, batch.weight.shape[1]
    for text, (ids, indices) in enumerate(zip(texts, places, strict=True)):
        slot = text * slots + entry.slot
        indices = places[0] if np.array_equal(texts[0], ids) else indices
        indices = indices[read_places(entry.example, text, pad_token_id)]
        batch.lengths[row, slot] = len(ids)
        if entry.example.labels:
            read = batch.write_reads((row,), read, entry.slot, entry.example, text, indices)
        else:
            batch.reads[row, slot] = indices[0]
    return read


# Row views: the texts of packed rows as rows, for attention kernels that need rows


def _num_view_rows(placed: Sequence[Placed], row_of: Sequence[int], examples: int) -> int:
    """Number of view rows per packed row; with documents, rounded up to a power of two to limit compilations."""
    documents = int(np.bincount(row_of, [len(entry.example.documents) for entry in placed]).max())
    return 1 << (documents - 1).bit_length() if documents else len(placed[0].example.texts) * examples


def _max_sharing(placed: Sequence[Placed], row_of: Sequence[int]) -> int:
    """Maximum number of texts that share a token: 2, or rounded up to a power of two to limit compilations."""
    pairs = zip(placed, row_of, strict=True)
    branches = Counter((row, entry.context) for entry, row in pairs if entry.context is not None)
    return max(2, 1 << (max(branches.values(), default=1) - 1).bit_length())


def _write_views(
    view: RowView, row: int, number: int, entry: Placed, places: list[np.ndarray], earlier_branches: int
) -> int:
    """Write the texts of an example, or its documents, as view rows from `number` on. Returns the end.

    Args:
        places: positions of each text's tokens in the packed row.
        earlier_branches: number of earlier branches of its context in the packed row.
    """
    if entry.example.documents:
        places = [places[0][start:end] for start, end in entry.example.spans_of(entry.example.texts[0])]
    for text, indices in enumerate(places):
        shared, side = (entry.shared, text) if entry.context is None else (entry.context_tokens, earlier_branches)
        _write_view(view, row, number + text, indices, shared if side else 0, side)
    return number + len(places)


def _write_view(view: RowView, row: int, number: int, indices: np.ndarray, shared: int, side: int) -> None:
    """Write a text as view row `number`.

    Args:
        row: the packed row.
        indices: positions of the text's tokens in the packed row.
        shared: number of leading tokens that it shares with `side` earlier texts.
    """
    view_places, view_rows = view.places[row, 0], view.rows[row, 0]
    view_indices = number * view_places.shape[1] + np.arange(len(indices))
    view_places.reshape(-1)[view_indices] = indices
    view_rows[0, indices[shared:]] = view_indices[shared:]
    view_rows[side if shared else 0, indices[:shared]] = view_indices[:shared]


# Padded rows: one row per text, or per document, padded to the longest


def pad_examples(
    micro_batches: Sequence[Sequence[Example]],
    *,
    examples: int,
    count: int,
    pad_token_id: int,
    pad_to_multiple_of: int | str | None,
    weights: Sequence[float] | None = None,
) -> Batch:
    """Lay out the micro-batches of one optimizer step as padded rows, one pass each: `[count, ...]`.

    Args:
        micro_batches: the examples of each; the last may be short, the first is not empty.
        examples: E, the number of examples in a full micro-batch; shorter ones are padded with examples of weight 0.
        count: number of micro-batches in a full step; a shorter step is padded likewise.
        pad_token_id: the padding, which also determines where classifiers read a text.
        pad_to_multiple_of: see `padded_length`.
        weights: one per micro-batch, for examples without their own weight; None: TRL's mean of means.
    """
    all_examples, like = [example for batch in micro_batches for example in batch], micro_batches[0][0]
    length = padded_length(max(example.longest_document for example in all_examples), pad_to_multiple_of)
    documents = max(sum(len(example.documents) for example in batch) for batch in micro_batches)
    rows = 1 << (documents - 1).bit_length() if documents else len(like.texts) * examples
    has_images = any(example.images for example in all_examples)
    axes = position_axes(example.positions for example in all_examples) if has_images else None
    batch = _empty_padded(count, examples, rows, length, pad_token_id, like, axes)
    images = PassImages(batch.tokens) if has_images else None
    for m, examples_of_pass in enumerate(micro_batches):
        row = read = 0
        for slot, example in enumerate(examples_of_pass):
            weight = 1.0 / (len(micro_batches) * len(examples_of_pass)) if weights is None else weights[m]
            batch.write_example((m,), slot, example, weight_of(example, weight))
            text_rows = [row] if documents else [text * examples + slot for text in range(len(example.texts))]
            read = _write_padded(batch, m, slot, example, text_rows, read, pad_token_id)
            row += len(example.documents)
            if example.images:
                first_feature = images.add(m, example.images, slot if example.context is None else example.context.key)
                for text_row, features in zip(text_rows, example.features, strict=True):
                    images.write((m, text_row, np.arange(len(features))), features, first_feature)
    return batch if images is None else batch._replace(images=images.joined())


def _empty_padded(
    count: int, examples: int, rows: int, length: int, pad_token_id: int, like: Example, axes: int | None
) -> Batch:
    tokens = np.full((count, rows, length), pad_token_id, np.int32)
    membership = np.eye(count, dtype=bool)[:, :, None]
    reads = np.tile(np.arange(rows, dtype=np.int32) * length, (count, 1))
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    if axes is not None:
        positions = np.repeat(positions[..., None], axes, axis=-1)
    targets = text = first_labels = None
    if like.labels:
        first_labels = np.full((count, rows), IGNORED, np.int32)
        reads, targets = np.zeros((count, rows * length), np.int32), np.full((count, rows * length), -1, np.int32)
        text = np.full_like(targets, len(like.texts) * examples)
    return Batch(
        tokens=tokens,
        positions=positions,
        reads=reads,
        # With a score head, a row of padding has length 1 to avoid dividing by zero; decoders ignore lengths.
        lengths=np.full((count, rows), 0 if like.labels else 1, np.int32),
        weight=np.zeros((count, examples), np.float32),
        micro_batch=np.broadcast_to(membership, (count, count, examples)),
        extras=empty_extras(like, count, examples=examples, reads=reads.shape[1]),
        targets=targets,
        text=text,
        router_token_count=np.zeros(tokens.shape, np.int16),
        first_labels=first_labels,
    )


def _write_padded(
    batch: Batch, m: int, slot: int, example: Example, rows: Sequence[int], read: int, pad_token_id: int
) -> int:
    """Write an example into micro-batch m, with its target reads starting at `read`. Returns the end of the reads.

    Args:
        rows: the row of each text; further documents follow in the rows after it.
    """
    examples, length = batch.weight.shape[1], batch.tokens.shape[2]
    primary = range(len(example.texts))[: example.num_primary_texts]
    for text, ids in enumerate(example.texts):
        indices = []
        for row, (start, end) in enumerate(example.spans_of(ids), start=rows[text]):
            batch.tokens[m, row, : end - start], batch.lengths[m, row] = ids[start:end], end - start
            batch.router_token_count[m, row, : end - start][: example.num_routed] = text in primary
            if example.positions and _axes(batch) is not None:
                batch.positions[m, row, : end - start] = example.positions[text][start:end]
            indices.append(row * length + np.arange(end - start))
        places = np.concatenate(indices)[read_places(example, text, pad_token_id)]
        if example.labels:
            read = batch.write_reads((m,), read, slot, example, text, places)
            if not example.documents:
                batch.first_labels[m, rows[text]] = example.labels[text][0]
        else:
            batch.reads[m, text * examples + slot] = places[0]
    return read


# Assignment of examples to packed rows


class Placed(NamedTuple):
    """An example with its slot in a step.

    slot: its index, counted over the step's micro-batches.
    weight: its weight in the step's loss.
    shared: number of tokens in the common prefix of its two texts.
    context: (micro-batch, key) of the context that it shares with other examples; None without a context.
    """

    slot: int
    example: Example
    weight: float
    shared: int
    context: Hashable = None

    @property
    def tokens(self) -> int:
        """Number of tokens that it occupies in a packed row, including its context."""
        return self.example.tokens - self.shared

    @property
    def context_tokens(self) -> int:
        """Number of tokens of its context, which a packed row stores once."""
        return 0 if self.context is None else self.example.context.tokens


def shared_tokens(texts: Sequence[Sequence[int]]) -> int:
    """Length of the common prefix of two texts, excluding the last token of each.

    0 unless there are exactly two texts: a token attends to one contiguous range of its row, so one text can precede
    the shared prefix and one can follow it.
    """
    if len(texts) != 2:
        return 0
    first, second = texts
    longest_possible = min(len(first), len(second)) - 1
    differences = np.flatnonzero(np.asarray(first[:longest_possible]) != np.asarray(second[:longest_possible]))
    return int(differences[0]) if len(differences) else longest_possible


def greedy_bins(
    costs: Sequence[int], bins: int, capacity: int | None = None, sizes: Sequence[int] | None = None
) -> list[int]:
    """Assign items to bins to balance costs: in order of decreasing cost, each item goes to the least full bin (LPT,
    Graham 1969).

    Args:
        capacity: maximum total of `sizes` per bin. The caller must ensure that all items fit; with different sizes,
            that holds if they fill at most half of the total room and no item exceeds half of a bin.
        sizes: sizes of the items; None: 1 each.
    """
    if bins == 1:
        return [0] * len(costs)
    sizes = [1] * len(costs) if sizes is None else sizes
    heap, bins_of_items = [(0, bin_) for bin_ in range(bins)], [0] * len(costs)
    free = [sum(sizes) if capacity is None else capacity] * bins
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        too_full = []
        while free[heap[0][1]] < sizes[item]:
            too_full.append(heapq.heappop(heap))
        cost, bin_ = heapq.heappop(heap)
        bins_of_items[item] = bin_
        free[bin_] -= sizes[item]
        for entry in (*too_full, (cost + costs[item], bin_)):
            heapq.heappush(heap, entry)
    return bins_of_items


def assign_rows(placed: Sequence[Placed], bins: int, capacity: int | None = None) -> list[int]:
    """The packed row of each example, by `greedy_bins`; examples that share a context stay together."""
    members: dict[Hashable, list[int]] = {}
    for index, entry in enumerate(placed):
        members.setdefault(("alone", index) if entry.context is None else entry.context, []).append(index)
    groups = list(members.values())
    costs = [
        sum(placed[index].tokens for index in group) - (len(group) - 1) * placed[group[0]].context_tokens
        for group in groups
    ]
    row_of = [0] * len(placed)
    for group, row in zip(groups, greedy_bins(costs, bins, capacity, [len(group) for group in groups]), strict=True):
        for index in group:
            row_of[index] = row
    return row_of


def place(
    micro_batches: Sequence[Sequence[Example]],
    *,
    examples: int,
    share_prefix: bool,
    weights: Sequence[float] | None = None,
) -> list[Placed]:
    """Number the examples of a step, with `examples` slots per micro-batch, and find what they share.

    The weight of an example is its own; if None, its micro-batch's in `weights`; if that is None, TRL's mean of means.
    """
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
    """(micro-batch, key) of an example's context; None without a context.

    Contexts are only shared within a micro-batch, because rotary embeddings may depend on its longest text.

    Raises:
        ValueError: the example does not have exactly one text that is at least as long as the context.
    """
    if example.context is None:
        return None
    key, tokens = example.context
    if len(example.texts) != 1 or example.documents or not 0 < tokens <= len(example.texts[0]):
        raise ValueError(
            f"The context {key!r} covers the first {tokens} tokens of an example whose texts have "
            f"{', '.join(str(len(text)) for text in example.texts)} tokens. An example with a context must have "
            "exactly one text, without documents, that starts with the context; otherwise leave `context` out."
        )
    return micro_batch, key


def longest_in_batch(placed: Sequence[Placed], size: int) -> list[int]:
    """For each example, the longest document in its TRL batch, a run of `size` slots."""
    longest: dict[int, int] = {}
    for entry in placed:
        longest[entry.slot // size] = max(longest.get(entry.slot // size, 0), entry.example.longest_document)
    return [longest[entry.slot // size] for entry in placed]
