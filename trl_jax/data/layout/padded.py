"""Padded rows: each text, or document of a text, has a row of its own, as long as the longest. Pure NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trl_jax.data.example import Example, weight_of
from trl_jax.data.layout.batch import Batch, empty_extras, padded_length, read_places


def pad_examples(
    micro_batches: Sequence[Sequence[Example]],
    *,
    examples: int,
    count: int,
    pad_token_id: int,
    pad_to_multiple_of: int | str | None,
    weights: Sequence[float] | None = None,
) -> Batch:
    """The micro-batches of one optimizer step as padded rows, one pass each: `[count, ...]`.

    Args:
        micro_batches: the examples of each; the last may be short, the first is not empty.
        examples: E, the examples a full micro-batch has; shorter ones are filled with examples of weight 0.
        count: micro-batches a full step has; a shorter step is filled likewise.
        pad_token_id: fills rows, and decides where they are read.
        pad_to_multiple_of: see `padded_length`.
        weights: of each micro-batch's examples that have none of their own; None makes it TRL's mean of means.
    """
    every, like = [example for batch in micro_batches for example in batch], micro_batches[0][0]
    length = padded_length(max(example.longest_document for example in every), pad_to_multiple_of)
    documents = max(sum(len(example.documents) for example in batch) for batch in micro_batches)
    rows = 1 << (documents - 1).bit_length() if documents else len(like.texts) * examples
    batch = _empty(count, examples, rows, length, pad_token_id, like)
    for m, own in enumerate(micro_batches):
        row = read = 0
        for slot, example in enumerate(own):
            weight = 1.0 / (len(micro_batches) * len(own)) if weights is None else weights[m]
            batch.enter((m,), slot, example, weight_of(example, weight))
            first = [row] if documents else [number * examples + slot for number in range(len(example.texts))]
            read = _write(batch, m, slot, example, first, read, pad_token_id)
            row += len(example.documents)
    return batch


def _empty(count: int, examples: int, rows: int, length: int, pad_token_id: int, like: Example) -> Batch:
    tokens = np.full((count, rows, length), pad_token_id, np.int32)
    member = np.eye(count, dtype=bool)[:, :, None]
    reads = np.tile(np.arange(rows, dtype=np.int32) * length, (count, 1))
    targets = text = None
    if like.labels:
        reads, targets = np.zeros((count, rows * length), np.int32), np.full((count, rows * length), -1, np.int32)
        text = np.full_like(targets, len(like.texts) * examples)
    return Batch(
        tokens=tokens,
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape),
        reads=reads,
        # A row of pads shows one of them, so that nothing divides by no tokens; decoders do not look.
        lengths=np.full((count, rows), 0 if like.labels else 1, np.int32),
        weight=np.zeros((count, examples), np.float32),
        micro_batch=np.broadcast_to(member, (count, count, examples)),
        extras=empty_extras(like, count, examples=examples, reads=reads.shape[1]),
        targets=targets,
        text=text,
        router_token_count=np.zeros(tokens.shape, np.int16),
    )


def _write(
    batch: Batch, m: int, slot: int, example: Example, rows: Sequence[int], read: int, pad_token_id: int
) -> int:
    """Enter an example into micro-batch m, its reads from `read` on where it has targets. Returns their end.

    Args:
        rows: the row of each text; its further documents are in those after it.
    """
    examples, length = batch.weight.shape[1], batch.tokens.shape[2]
    primary = range(len(example.texts))[: example.num_primary_texts]
    for number, ids in enumerate(example.texts):
        spans = example.spans if example.documents else [(0, len(ids))]
        at = []
        for row, (start, end) in enumerate(spans, start=rows[number]):
            batch.tokens[m, row, : end - start], batch.lengths[m, row] = ids[start:end], end - start
            batch.router_token_count[m, row, : end - start] = number in primary
            at.append(row * length + np.arange(end - start))
        places = np.concatenate(at)[read_places(example, number, pad_token_id)]
        if example.labels:
            read = batch.read((m,), read, slot, example, number, places)
        else:
            batch.reads[m, number * examples + slot] = places[0]
    return read
