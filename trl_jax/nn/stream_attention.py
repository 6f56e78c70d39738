"""Attention along a stream: what its tokens see as runs of keys, and the kernel for where it is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.core.stream import BLOCK, Stream
from trl_jax.nn.block_attention import attend_blocks
from trl_jax.nn.dealt import Dealt
from trl_jax.nn.platform import platform
from trl_jax.nn.runs import Runs
from trl_jax.nn.splash import attend_splash, splashes


def attend_stream(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    stream: Stream,
    *,
    scale: float | jax.Array,
    softcap: float | None = None,
    window: jax.Array | None = None,
    dealt: Dealt | None = None,
) -> jax.Array:
    """Queries `[R, T, H, C]` on keys and values `[R, T, K, C]` of as many streams; T is a multiple of BLOCK.

    A token that sees nothing gets zeros. `scale`, `softcap` and `window` are as `attend` takes them. Where tokens are
    `dealt`, queries and `stream` are this device's, keys and values those of all.
    """
    rows, length = q.shape[:2]
    if length % BLOCK:
        raise ValueError(f"A stream of {length} tokens is not a multiple of {BLOCK}: lay it out with data.streams.")
    runs, flat = _runs(stream, window, dealt, k.shape[1]), [y.reshape(-1, *y.shape[2:]) for y in (q, k, v)]
    attended = attend_splash if platform() == "tpu" and splashes(flat[1], runs) else attend_blocks
    return attended(*flat, runs, scale=scale, softcap=softcap).reshape(q.shape)


def seen_both_ways(stream: Stream) -> Stream:
    """For texts whose tokens see what comes after them, too. Texts must share nothing (the packed layout)."""
    length = stream.first.shape[-1]
    last = jnp.diff(stream.first, axis=-1, append=-1) != 0
    ends = jax.lax.cummin(jnp.where(last, jnp.arange(1, length + 1), length), axis=last.ndim - 1, reverse=True)
    return stream._replace(end=ends)


def _runs(stream: Stream, window: jax.Array | None, dealt: Dealt | None, length: int) -> Runs:
    """`[N]`, places counted along all streams, one behind the other and each of this `length`."""
    rows, own = stream.first.shape
    offset = jnp.arange(rows, dtype=jnp.int32)[:, None] * length
    first, end = ((y + offset).reshape(-1) for y in (stream.first, stream.end))
    if window is None:
        return Runs(first, end)
    numbers = jnp.arange(rows * own // BLOCK) if dealt is None else dealt.blocks(rows, own // BLOCK)
    place = (numbers[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)).reshape(-1)
    nearest, last = jnp.maximum(first, place - window + 1), place + jnp.minimum(end - place, window)
    if stream.prompt is None:
        return Runs(nearest, last)
    # An answer before its prompt: next to the answer's first token is the prompt's first, but its last is the nearest.
    prompt = (stream.prompt + offset).reshape(-1)
    before, position = place < prompt, end - 1 - place
    second = prompt + jnp.maximum(position - window + 1, 0)
    return Runs(nearest, jnp.where(before, jnp.minimum(last, prompt), last), jnp.where(before, second, end), end)
