"""Attention along a stream: what its tokens see as runs of keys, and the kernel for where it is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.core.packed import BLOCK, Packed
from trl_jax.nn.block_attention import attend_blocks
from trl_jax.nn.key_ranges import KeyRanges
from trl_jax.nn.platform import platform
from trl_jax.nn.splash import attend_splash, splashes
from trl_jax.nn.striped import Striped


def attend_packed(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    packed: Packed,
    *,
    scale: float | jax.Array,
    softcap: float | None = None,
    window: jax.Array | None = None,
    striped: Striped | None = None,
) -> jax.Array:
    """Queries `[R, T, H, C]` on keys and values `[R, T, K, C]` of as many streams; T is a multiple of BLOCK.

    A token that sees nothing gets zeros. `scale`, `softcap` and `window` are as `attend` takes them. Where tokens are
    `dealt`, queries and `stream` are this device's, keys and values those of all.
    """
    rows, length = q.shape[:2]
    if length % BLOCK:
        raise ValueError(f"A stream of {length} tokens is not a multiple of {BLOCK}: lay it out with data.streams.")
    runs, flat = _runs(packed, window, striped, k.shape[1]), [y.reshape(-1, *y.shape[2:]) for y in (q, k, v)]
    attended = attend_splash if platform() == "tpu" and splashes(flat[1], runs) else attend_blocks
    return attended(*flat, runs, scale=scale, softcap=softcap).reshape(q.shape)


def seen_both_ways(packed: Packed) -> Packed:
    """For texts whose tokens see what comes after them, too. Texts must share nothing (the packed layout)."""
    length = packed.first.shape[-1]
    last = jnp.diff(packed.first, axis=-1, append=-1) != 0
    ends = jax.lax.cummin(jnp.where(last, jnp.arange(1, length + 1), length), axis=last.ndim - 1, reverse=True)
    return packed._replace(end=ends)


def _runs(packed: Packed, window: jax.Array | None, striped: Striped | None, length: int) -> KeyRanges:
    """`[N]`, places counted along all streams, one behind the other and each of this `length`."""
    rows, own = packed.first.shape
    offset = jnp.arange(rows, dtype=jnp.int32)[:, None] * length
    first, end = ((y + offset).reshape(-1) for y in (packed.first, packed.end))
    if window is None:
        return KeyRanges(first, end)
    numbers = jnp.arange(rows * own // BLOCK) if striped is None else striped.blocks(rows, own // BLOCK)
    place = (numbers[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)).reshape(-1)
    nearest, last = jnp.maximum(first, place - window + 1), place + jnp.minimum(end - place, window)
    if packed.prompt is None:
        return KeyRanges(nearest, last)
    # An answer before its prompt: next to the answer's first token is the prompt's first, but its last is the nearest.
    prompt = (packed.prompt + offset).reshape(-1)
    before, position = place < prompt, end - 1 - place
    second = prompt + jnp.maximum(position - window + 1, 0)
    return KeyRanges(nearest, jnp.where(before, jnp.minimum(last, prompt), last), jnp.where(before, second, end), end)
