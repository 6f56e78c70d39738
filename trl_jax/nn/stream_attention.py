"""Attention along a stream, block by block: blocks of which nothing is seen are skipped, forward and backward.

The softmax is taken online (Milakov and Gimelshein 2018, arXiv:1805.02867) and the backward pass computes the scores
again from the logarithm of its sum (Dao et al. 2022, arXiv:2205.14135): no more than a block of scores exists at once.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from trl_jax.core.stream import BLOCK, Stream
from trl_jax.nn.dealt import Dealt

SAVED = "attended"  # what checkpoint policies call the results, which cost more to compute again than to keep
_MASKED = float(np.finfo(np.float32).min)
_exact = partial(jnp.einsum, preferred_element_type=jnp.float32)


class _Sight(NamedTuple):
    """Per token: the first of its own run that it sees, and what it sees of the prompt. int32, in blocks `[N, B]`.

    at: which blocks of all these are, `[N]`.
    """

    first: jax.Array
    prompt: jax.Array
    prompt_end: jax.Array
    at: jax.Array


def attend_stream(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    stream: Stream,
    positions: jax.Array,
    *,
    scale: float | jax.Array,
    softcap: float | None = None,
    window: jax.Array | None = None,
    dealt: Dealt | None = None,
) -> jax.Array:
    """Queries `[R, T, H, C]` on keys and values `[R, T, K, C]` of as many streams; T is a multiple of BLOCK.

    A token that sees nothing gets zeros. `positions` int32 `[R, T]` say how far apart tokens are; `scale`, `softcap`
    and `window` are as `attend` takes them. Where tokens are `dealt`, queries, `stream` and `positions` are this
    device's, keys and values those of all.
    """
    rows, length, heads, channels = q.shape
    if length % BLOCK:
        raise ValueError(f"A stream of {length} tokens is not a multiple of {BLOCK}: lay it out with data.streams.")
    key_heads, blocks = k.shape[2], rows * length // BLOCK
    at = jnp.arange(blocks, dtype=jnp.int32) if dealt is None else dealt.blocks(rows, length // BLOCK)
    grouped = q.reshape(blocks, BLOCK, key_heads, -1, channels).transpose(0, 2, 3, 1, 4)
    queries = grouped.reshape(blocks, key_heads, -1, channels)
    keys, values = (y.reshape(-1, BLOCK, key_heads, channels).transpose(0, 2, 1, 3) for y in (k, v))
    sight = _sight(stream, positions, window, at, k.shape[1])
    out = _attend(queries, keys, values, sight, jnp.asarray(scale, jnp.float32), softcap)
    return out.reshape(grouped.shape).transpose(0, 3, 1, 2, 4).reshape(q.shape)


def seen_both_ways(stream: Stream) -> Stream:
    """For texts whose tokens see what comes after them, too: the whole text becomes the prompt of each.

    Texts must share nothing (the packed layout).
    """
    length = stream.start.shape[-1]
    last = jnp.diff(stream.start, axis=-1, append=-1) != 0
    ends = jax.lax.cummin(jnp.where(last, jnp.arange(1, length + 1), length), axis=last.ndim - 1, reverse=True)
    return stream._replace(prompt=stream.start, prompt_end=jnp.where(stream.start < length, ends, 0))


def _sight(stream: Stream, positions: jax.Array, window: jax.Array | None, at: jax.Array, length: int) -> _Sight:
    """Places counted along all streams, one behind the other and each of this `length`, and moved up to where a window
    begins."""
    offset = jnp.arange(len(positions), dtype=jnp.int32)[:, None] * length
    first, prompt, end = stream.start + offset, stream.prompt + offset, stream.prompt_end + offset
    if window is not None:
        place = (at[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)).reshape(positions.shape)
        same = stream.prompt + offset + positions  # where the token would be if its text followed the prompt
        first = jnp.maximum(first, place - window + 1)
        prompt, end = jnp.maximum(prompt, same - window + 1), same + jnp.minimum(end - same, window)
    return _Sight(*(y.reshape(-1, BLOCK) for y in (first, prompt, end)), at)


def _seen(sight: _Sight, places: jax.Array, keys: jax.Array) -> jax.Array:
    """Whether tokens at `places` `[..., B]` see those at `keys` `[S]`."""
    first, prompt, end, places = (y[..., None] for y in (*sight[:3], places))
    return ((keys >= first) & (keys <= places)) | ((keys >= prompt) & (keys < end))


def _key_blocks(sight: _Sight, count: int) -> tuple[jax.Array, jax.Array]:
    """For each block of queries those of the `count` blocks of keys that any of them sees, in order, `[N, count]`; and
    how many, `[N]`."""
    here = sight.at[:, None]
    starts = jnp.arange(count) * BLOCK
    ends = starts + BLOCK
    first, prompt, end = (y[..., None] for y in sight[:3])
    own = jnp.any(first < ends, axis=1) & (starts <= here * BLOCK)
    shared = jnp.any(jnp.maximum(prompt, starts) < jnp.minimum(end, ends), axis=1)
    needed = own | shared
    order = jnp.argsort(~needed, axis=1, stable=True).astype(jnp.int32)
    return order, jnp.sum(needed, axis=1, dtype=jnp.int32)


def _scores(q, k, sight, key_block, scale, softcap):
    """Scores `[K, GB, B]` of one block of queries on one of keys, and which of them are seen."""
    within = jnp.arange(BLOCK, dtype=jnp.int32)
    seen = _seen(sight, sight.at * BLOCK + within, key_block * BLOCK + within)
    scores = _exact("kmc,ksc->kms", q, k) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    by_group = scores.reshape(len(q), -1, BLOCK, BLOCK)
    return jnp.where(seen, by_group, _MASKED).reshape(scores.shape)


def _forward(q, k, v, sight, scale, softcap):
    """Results, in the dtype of `v`, and the logarithm of the softmax's sum `[N, K, GB]`."""

    def of_block(block):
        q_block, own, key_blocks, count = block

        def add(turn, sums):
            total, top, weight = sums
            key_block = key_blocks[turn]
            scores = _scores(q_block, k[key_block], own, key_block, scale, softcap)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
            weights, shrunk = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            added = _exact("kms,ksc->kmc", weights.astype(v.dtype), v[key_block])
            return total * shrunk[..., None] + added, new_top, weight * shrunk + jnp.sum(weights, axis=-1)

        # The first maximum lies above a masked score: what a row does not see weighs exp(-inf), also before it sees.
        one_each = jnp.zeros(q_block.shape[:2])
        none = jnp.zeros(q_block.shape, jnp.float32), one_each + _MASKED / 2, one_each
        total, top, weight = jax.lax.fori_loop(0, count, add, none)
        weight = jnp.where(weight > 0, weight, 1)
        return (total / weight[..., None]).astype(v.dtype), top + jnp.log(weight)

    return jax.lax.map(of_block, (q, sight, *_key_blocks(sight, len(k))))


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q, k, v, sight, scale, softcap):
    return _forward(q, k, v, sight, scale, softcap)[0]


def _attend_forward(q, k, v, sight, scale, softcap):
    out, log_sum = (checkpoint_name(y, SAVED) for y in _forward(q, k, v, sight, scale, softcap))
    return out, (q, k, v, sight, scale, out, log_sum)


def _attend_backward(softcap, saved, gradient):
    q, k, v, sight, scale, out, log_sum = saved
    inner = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def of_block(to_keys_values, block):
        q_block, g_block, log_sum_block, inner_block, own, key_blocks, count = block

        def add(turn, sums):
            to_q, to_k, to_v = sums
            key_block = key_blocks[turn]
            k_block, v_block = k[key_block], v[key_block]
            scores = _scores(q_block, k_block, own, key_block, scale, softcap)
            weights = jnp.exp(scores - log_sum_block[..., None])
            to_scores = weights * (_exact("kmc,ksc->kms", g_block, v_block) - inner_block[..., None])
            if softcap is not None:  # what is masked has no weight
                to_scores *= 1 - jnp.square(jnp.where(scores > _MASKED, scores, 0) / softcap)
            to_scores = (to_scores * scale).astype(q.dtype)
            to_q += _exact("kms,ksc->kmc", to_scores, k_block)
            to_k = to_k.at[key_block].add(_exact("kms,kmc->ksc", to_scores, q_block))
            to_v = to_v.at[key_block].add(_exact("kms,kmc->ksc", weights.astype(v.dtype), g_block))
            return to_q, to_k, to_v

        none = jnp.zeros(q_block.shape, jnp.float32)
        to_q, *to_keys_values = jax.lax.fori_loop(0, count, add, (none, *to_keys_values))
        return tuple(to_keys_values), to_q.astype(q.dtype)

    blocks = (q, gradient, log_sum, inner, sight, *_key_blocks(sight, len(k)))
    none = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    (to_k, to_v), to_q = jax.lax.scan(of_block, none, blocks)
    return to_q, to_k.astype(k.dtype), to_v.astype(v.dtype), None, None


_attend.defvjp(_attend_forward, _attend_backward)
