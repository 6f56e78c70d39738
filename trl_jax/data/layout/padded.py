"""Padded rows: each text has a row of its own, as long as the longest. Pure NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trl_jax.data.example import Example
from trl_jax.data.layout.batch import Batch, last_real_token, padded_length


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
        weights: of an example of each micro-batch; None makes it TRL's mean of means.
    """
    longest = max(example.longest for batch in micro_batches for example in batch)
    first = micro_batches[0][0]
    batch = _empty(count, examples, len(first.texts), padded_length(longest, pad_to_multiple_of), pad_token_id, first)
    for m, own in enumerate(micro_batches):
        if own:
            share = 1.0 / (len(micro_batches) * len(own)) if weights is None else weights[m]
            batch.weight[m, : len(own)] = share
        for slot, example in enumerate(own):
            _write(batch, m, slot, example, pad_token_id)
    return batch


def _empty(count: int, examples: int, texts: int, length: int, pad_token_id: int, like: Example) -> Batch:
    rows = texts * examples
    tokens = np.full((count, rows, length), pad_token_id, np.int32)
    member = np.eye(count, dtype=bool)[:, :, None]
    return Batch(
        tokens=tokens,
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape),
        reads=np.tile(np.arange(rows, dtype=np.int32) * length, (count, 1)),
        lengths=np.ones((count, rows), np.int32),  # a row of pads shows one of them: nothing divides by no tokens
        weight=np.zeros((count, examples), np.float32),
        micro_batch=np.broadcast_to(member, (count, count, examples)),
        extras={name: np.zeros((count, examples), np.float32) for name in like.extras},
    )


def _write(batch: Batch, m: int, slot: int, example: Example, pad_token_id: int) -> None:
    examples, length = batch.weight.shape[1], batch.tokens.shape[2]
    for number, ids in enumerate(example.texts):
        row = number * examples + slot
        batch.tokens[m, row, : len(ids)] = ids
        batch.reads[m, row] = row * length + last_real_token(ids, pad_token_id)
        batch.lengths[m, row] = len(ids)
    for name, values in batch.extras.items():
        values[m, slot] = example.extras[name]
