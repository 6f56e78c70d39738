"""Texts in rows: which tokens they have, and one vector of each."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.core.packed import Packed


def valid_tokens(tokens: jax.Array, valid: jax.Array | None, lengths: jax.Array | None) -> jax.Array:
    """The tokens `[R, T]` that may be seen, bool: `valid`, else the first `lengths` `[R]` of each row, else all."""
    if valid is not None:
        return valid
    if lengths is None:
        return jnp.ones(tokens.shape, bool)
    return jnp.arange(tokens.shape[1]) < lengths[:, None]


def pool(
    hidden: jax.Array, reads: jax.Array, pooling: str, *, valid: jax.Array | None, packed: Packed | None
) -> jax.Array:
    """One vector for the text of each read.

    Args:
        hidden: `[R, T, D]`.
        reads: int32 `[N]`, a token of each text, row * T + place in the row; whichever it is.
        pooling: "first" takes that of the text's first token, "mean" their mean.
        valid: bool `[R, T]`, the tokens of the text that a row is; None in packed rows.
        packed: of `seen_both_ways`, where a row has several texts.

    Returns:
        `[N, D]`.
    """
    rows, length = reads // hidden.shape[1], hidden.shape[1]
    if packed is None:
        return _of_rows(hidden, valid, pooling)[rows]
    first, end = (y.reshape(-1)[reads] + rows * length for y in (packed.first, packed.end))
    return _of_texts(hidden.reshape(-1, hidden.shape[-1]), first, end, pooling)


def _of_rows(hidden: jax.Array, valid: jax.Array, pooling: str) -> jax.Array:
    """Of rows `[R, T, D]` with one text each: `[R, D]`."""
    if pooling == "first":
        return hidden[:, 0]
    visible = valid[..., None].astype(hidden.dtype)
    return jnp.sum(hidden * visible, axis=1) / jnp.sum(visible, axis=1)


def _of_texts(hidden: jax.Array, first: jax.Array, end: jax.Array, pooling: str) -> jax.Array:
    """Of packed rows end to end `[R x T, D]`, texts from `first` up to but without `end`: `[N, D]`."""
    if pooling == "first":
        return jnp.take(hidden, first, axis=0, mode="clip")  # a place without a text begins behind the end
    place = jnp.arange(len(hidden))
    inside = ((place >= first[:, None]) & (place < end[:, None])).astype(hidden.dtype)
    return inside @ hidden / jnp.maximum(jnp.sum(inside, axis=1, keepdims=True), 1)
