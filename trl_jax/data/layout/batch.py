"""Batches: token rows with positions, where each is read, and how much each pair counts. Pure NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trl_jax.core.packed import Packed


class PairBatch(NamedTuple):
    """The pairs of one pass through the model: as padded rows, or laid end to end in a stream.

    First comes every chosen answer, then every rejected one. Padded, each text has a row of its own; in a stream there
    is one row for all, and `stream` says what its tokens see.

    tokens, positions: int32 `[R, T]`. at: int32 `[2P]`, the token whose hidden state is scored, counted in its row.
    lengths: int32 `[2P]`, how many tokens a text has.
    margin, weight: float32 `[P]`; a weight of 0 marks a pair that is not in this pass.
    member: bool `[M, P]`, which micro-batch of the step a pair belongs to; metrics are summed over each.
    In a step every array has a leading axis of passes, which are computed one after another.
    """

    tokens: np.ndarray
    positions: np.ndarray
    at: np.ndarray
    lengths: np.ndarray
    weight: np.ndarray
    member: np.ndarray
    margin: np.ndarray | None = None
    packed: Packed | None = None


def scored_token(ids: Sequence[int], pad_token_id: int) -> int:
    """Where transformers' classifiers read a row: the rightmost id that is not the pad id, else 0.

    Ids, not the attention mask: where pad and EOS are the same token, a closing EOS is passed over.
    """
    real = np.flatnonzero(np.asarray(ids) != pad_token_id)
    return int(real[-1]) if len(real) else 0


def padded_length(longest: int, pad_to_multiple_of: int | str | None) -> int:
    """The row length for a batch whose longest row has `longest` tokens.

    Each length compiles once. "auto" rounds up to a rung of a ladder, 32 tokens apart and from 256 on four rungs an
    octave, so that a run meets a handful of lengths; what a real token computes does not depend on the pads behind it.
    A number rounds up to its multiple; None takes the length as it is.
    """
    if pad_to_multiple_of is None:
        return longest
    if pad_to_multiple_of == "auto":
        octave = 1 << (longest - 1).bit_length() >> 1
        bucket = max(32, octave // 4)
    else:
        bucket = int(pad_to_multiple_of)
    return -(-longest // bucket) * bucket


def pad_pairs(
    micro_batches: Sequence[Sequence[dict]],
    *,
    pairs: int,
    count: int,
    pad_token_id: int,
    pad_to_multiple_of: int | str | None,
    weights: Sequence[float] | None = None,
) -> PairBatch:
    """The micro-batches of one optimizer step as padded rows, one pass each: `[count, ...]`.

    Args:
        micro_batches: rows with `chosen_ids`, `rejected_ids` and maybe `margin`; the last may be short.
        pairs: P, the pairs a full micro-batch has; shorter ones are filled with pairs of weight 0.
        count: micro-batches a full step has; a shorter step is filled likewise.
        pad_token_id: fills rows, and decides where they are read.
        pad_to_multiple_of: see `padded_length`.
        weights: of a pair of each micro-batch; None makes it TRL's mean of means.
    """
    longest = max(
        max(len(row["chosen_ids"]), len(row["rejected_ids"])) for rows in micro_batches for row in rows
    )
    length = padded_length(longest, pad_to_multiple_of)
    tokens = np.full((count, 2 * pairs, length), pad_token_id, np.int32)
    at = np.zeros((count, 2 * pairs), np.int32)
    lengths = np.ones((count, 2 * pairs), np.int32)  # a row of pads shows one of them: nothing divides by no tokens
    weight = np.zeros((count, pairs), np.float32)
    margin = np.zeros((count, pairs), np.float32) if "margin" in micro_batches[0][0] else None
    member = np.broadcast_to(np.eye(count, dtype=bool)[:, :, None], (count, count, pairs))
    for m, rows in enumerate(micro_batches):
        if rows:
            weight[m, : len(rows)] = 1.0 / (len(micro_batches) * len(rows)) if weights is None else weights[m]
        for i, row in enumerate(rows):
            for place, ids in ((i, row["chosen_ids"]), (pairs + i, row["rejected_ids"])):
                tokens[m, place, : len(ids)] = ids
                at[m, place], lengths[m, place] = scored_token(ids, pad_token_id), len(ids)
            if margin is not None:
                margin[m, i] = row["margin"]
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return PairBatch(tokens, positions, at, lengths, weight, member, margin)
