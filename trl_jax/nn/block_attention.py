"""Attention along a stream, block by block, in plain XLA: blocks of which nothing is seen are skipped, both ways.

The softmax is taken online (Milakov and Gimelshein 2018, arXiv:1805.02867) and the backward pass computes the scores
again from the logarithm of its sum (Dao et al. 2022, arXiv:2205.14135): no more than a block of scores exists at once.

Scores lie with keys first, `[K, B, GB]`: so a sum over keys adds whole rows, and every product sums over the axes that
a CPU's library is quick at.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from trl_jax.core.packed import BLOCK
from trl_jax.nn.key_ranges import SAVED, KeyRanges

_MASKED = float(np.finfo(np.float32).min)
_exact = partial(jnp.einsum, preferred_element_type=jnp.float32)


def attend_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, runs: KeyRanges, *, scale: jax.Array, softcap: float | None
) -> jax.Array:
    """Queries `[N, H, C]` on keys and values `[S, K, C]`, both multiples of BLOCK; `runs` are of the queries."""
    heads, channels = k.shape[1:]
    grouped = q.reshape(-1, BLOCK, heads, q.shape[1] // heads, channels).transpose(0, 2, 3, 1, 4)
    queries = grouped.reshape(len(grouped), heads, -1, channels)
    keys, values = (y.reshape(-1, BLOCK, heads, channels).transpose(0, 2, 1, 3) for y in (k, v))
    blocks = jax.tree.map(lambda y: jnp.tile(y.reshape(-1, BLOCK), (1, grouped.shape[2])), runs)
    out = _attend(queries, keys, values, blocks, jnp.asarray(scale, jnp.float32), softcap)
    return out.reshape(grouped.shape).transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _key_blocks(runs: KeyRanges, count: int) -> tuple[jax.Array, jax.Array]:
    """For each block of queries those of the `count` blocks of keys that any of them sees, in order, `[N, count]`; and
    how many, `[N]`."""
    needed = jax.tree.map(lambda y: y[:, :BLOCK], runs).blocks(BLOCK, BLOCK, count)  # every head of a group's are alike
    order = jnp.argsort(~needed, axis=1, stable=True).astype(jnp.int32)
    return order, jnp.sum(needed, axis=1, dtype=jnp.int32)


def _scores(q, k, runs, key_block, scale, softcap):
    """Scores `[K, B, GB]` of one block of keys for one of queries; what is not seen is _MASKED."""
    keys = key_block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    scores = _exact("ksc,kmc->ksm", k, q) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    return jnp.where(runs.see(keys).T, scores, _MASKED)


def _forward(q, k, v, runs, scale, softcap):
    """Results, in the dtype of `v`, and the logarithm of the softmax's sum `[N, K, GB]`."""
    turned = v.swapaxes(2, 3)

    def of_block(block):
        q_block, own, key_blocks, count = block

        def add(turn, sums):
            total, top, weight = sums
            key_block = key_blocks[turn]
            scores = _scores(q_block, k[key_block], own, key_block, scale, softcap)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            weights, shrunk = jnp.exp(scores - new_top[:, None]), jnp.exp(top - new_top)
            added = _exact("kcs,ksm->kcm", turned[key_block], weights.astype(v.dtype))
            return total * shrunk[:, None] + added, new_top, weight * shrunk + jnp.sum(weights, axis=1)

        # The first maximum lies above a masked score: what a row does not see weighs exp(-inf), also before it sees.
        one_each = jnp.zeros(q_block.shape[:2])
        none = _turned_zeros(q_block), one_each + _MASKED / 2, one_each
        total, top, weight = jax.lax.fori_loop(0, count, add, none)
        weight = jnp.where(weight > 0, weight, 1)
        return (total / weight[:, None]).astype(v.dtype).swapaxes(1, 2), top + jnp.log(weight)

    return jax.lax.map(of_block, (q, runs, *_key_blocks(runs, len(k))))


def _turned_zeros(q_block):
    """`[K, C, GB]`: what is summed for a block of queries."""
    return jnp.zeros(q_block.shape, jnp.float32).swapaxes(1, 2)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q, k, v, runs, scale, softcap):
    return _forward(q, k, v, runs, scale, softcap)[0]


def _attend_forward(q, k, v, runs, scale, softcap):
    out, log_sum = (checkpoint_name(y, SAVED) for y in _forward(q, k, v, runs, scale, softcap))
    return out, (q, k, v, runs, scale, out, log_sum)


def _attend_backward(softcap, saved, gradient):
    q, k, v, runs, scale, out, log_sum = saved
    inner = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    turned = k.swapaxes(2, 3)

    def of_block(to_keys_values, block):
        q_block, g_block, log_sum_block, inner_block, own, key_blocks, count = block

        def add(turn, sums):
            to_q, to_k, to_v = sums
            key_block = key_blocks[turn]
            scores = _scores(q_block, k[key_block], own, key_block, scale, softcap)
            weights = jnp.exp(scores - log_sum_block[:, None])
            to_scores = weights * (_exact("ksc,kmc->ksm", v[key_block], g_block) - inner_block[:, None])
            if softcap is not None:  # what is masked has no weight
                to_scores *= 1 - jnp.square(jnp.where(scores > _MASKED, scores, 0) / softcap)
            to_scores = (to_scores * scale).astype(q.dtype)
            to_q += _exact("kcs,ksm->kcm", turned[key_block], to_scores)
            to_k = to_k.at[key_block].add(_exact("ksm,kmc->ksc", to_scores, q_block))
            to_v = to_v.at[key_block].add(_exact("ksm,kmc->ksc", weights.astype(v.dtype), g_block))
            return to_q, to_k, to_v

        to_q, *to_keys_values = jax.lax.fori_loop(0, count, add, (_turned_zeros(q_block), *to_keys_values))
        return tuple(to_keys_values), to_q.astype(q.dtype).swapaxes(1, 2)

    blocks = (q, gradient, log_sum, inner, runs, *_key_blocks(runs, len(k)))
    none = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    (to_k, to_v), to_q = jax.lax.scan(of_block, none, blocks)
    return to_q, to_k.astype(k.dtype), to_v.astype(v.dtype), None, None


_attend.defvjp(_attend_forward, _attend_backward)
