"""Attention along packed rows in plain XLA, block by block: blocks of which nothing is seen are skipped, both ways.

The softmax is taken online (Milakov and Gimelshein 2018, arXiv:1805.02867) and the backward pass computes the scores
again from the logarithm of its sum (Dao et al. 2022, arXiv:2205.14135): no more than a block of scores exists at once.

Scores lie with keys first, `[K, B, M]` of a block of B keys and one of M = B x G queries: so a sum over keys adds whole
rows, and every product sums over the axes that a CPU's library is quick at. Arrays of all blocks begin with their
number, N of queries and S of keys.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from trl_jax.core.packed import BLOCK
from trl_jax.nn.attention.key_ranges import SAVED, KeyRanges

_MASKED = float(np.finfo(np.float32).min)
_exact = partial(jnp.einsum, preferred_element_type=jnp.float32)


def attend_blocks(
    q_NHC: jax.Array,
    k_SKC: jax.Array,
    v_SKC: jax.Array,
    ranges: KeyRanges,
    *,
    scale: jax.Array,
    softcap: float | None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Results `[N, H, C]` of queries on keys and values, N and S multiples of BLOCK; `ranges` are of the queries.

    `sinks` `[H]` as in `attend_padded`: the softmax's sum of a head has another term, `exp(sink)`, at its end.
    """
    heads, channels = k_SKC.shape[1:]
    grouped = q_NHC.reshape(-1, BLOCK, heads, q_NHC.shape[1] // heads, channels).transpose(0, 2, 3, 1, 4)
    q_NKMC = grouped.reshape(len(grouped), heads, -1, channels)
    k_SKBC, v_SKBC = (y.reshape(-1, BLOCK, heads, channels).transpose(0, 2, 1, 3) for y in (k_SKC, v_SKC))
    blocks = jax.tree.map(lambda y: jnp.tile(y.reshape(-1, BLOCK), (1, grouped.shape[2])), ranges)
    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(heads, -1), BLOCK, axis=1)
    out = _attend(q_NKMC, k_SKBC, v_SKBC, sinks, blocks, jnp.asarray(scale, jnp.float32), softcap)
    return out.reshape(grouped.shape).transpose(0, 3, 1, 2, 4).reshape(q_NHC.shape)


def _key_blocks(ranges: KeyRanges, count: int) -> tuple[jax.Array, jax.Array]:
    """For each block of queries those of the `count` blocks of keys that any of them sees, in order, `[N, count]`; and
    how many, `[N]`."""
    needed = jax.tree.map(lambda y: y[:, :BLOCK], ranges).blocks(BLOCK, BLOCK, count)  # a group's heads are alike
    order = jnp.argsort(~needed, axis=1, stable=True).astype(jnp.int32)
    return order, jnp.sum(needed, axis=1, dtype=jnp.int32)


def _scores(q_KMC, k_KBC, ranges, key_block, scale, softcap):
    """Scores `[K, B, M]` of one block of keys for one of queries; _MASKED where a key is not seen."""
    keys = key_block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    scores = _exact("ksc,kmc->ksm", k_KBC, q_KMC) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    return jnp.where(ranges.see(keys).T, scores, _MASKED)


def _forward(q, k, v, sinks_KM, ranges, scale, softcap):
    """Results `[N, K, M, C]`, in the dtype of `v`, and the logarithm of the softmax's sum `[N, K, M]`."""
    v_T = v.swapaxes(2, 3)

    def of_block(block):
        q_KMC, block_ranges, key_blocks, count = block

        def add(turn, sums):
            total_KCM, max_KM, sum_KM = sums
            key_block = key_blocks[turn]
            scores = _scores(q_KMC, k[key_block], block_ranges, key_block, scale, softcap)
            new_max_KM = jnp.maximum(max_KM, jnp.max(scores, axis=1))
            weights, rescale = jnp.exp(scores - new_max_KM[:, None]), jnp.exp(max_KM - new_max_KM)
            added = _exact("kcs,ksm->kcm", v_T[key_block], weights.astype(v.dtype))
            return total_KCM * rescale[:, None] + added, new_max_KM, sum_KM * rescale + jnp.sum(weights, axis=1)

        # The first maximum lies above a masked score: what a row does not see weighs exp(-inf), also before it sees.
        zeros_KM = jnp.zeros(q_KMC.shape[:2])
        initial = _zeros_T(q_KMC), zeros_KM + _MASKED / 2, zeros_KM
        total_KCM, max_KM, sum_KM = jax.lax.fori_loop(0, count, add, initial)
        sum_KM = jnp.where(sum_KM > 0, sum_KM, 1)
        out_KCM, log_sum_KM = total_KCM / sum_KM[:, None], max_KM + jnp.log(sum_KM)
        if sinks_KM is not None:
            out_KCM *= jax.nn.sigmoid(log_sum_KM - sinks_KM)[:, None]
            log_sum_KM = jnp.logaddexp(log_sum_KM, sinks_KM)
        return out_KCM.astype(v.dtype).swapaxes(1, 2), log_sum_KM

    return jax.lax.map(of_block, (q, ranges, *_key_blocks(ranges, len(k))))


def _zeros_T(q_KMC):
    """Float32 zeros `[K, C, M]` to sum up for a block of queries."""
    return jnp.zeros(q_KMC.shape, jnp.float32).swapaxes(1, 2)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(q, k, v, sinks, ranges, scale, softcap):
    return _forward(q, k, v, sinks, ranges, scale, softcap)[0]


def _attend_forward(q, k, v, sinks, ranges, scale, softcap):
    out, log_sum = (checkpoint_name(y, SAVED) for y in _forward(q, k, v, sinks, ranges, scale, softcap))
    return out, (q, k, v, sinks, ranges, scale, out, log_sum)


def _attend_backward(softcap, saved, d_out):
    q, k, v, sinks, ranges, scale, out, log_sum = saved
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    k_T = k.swapaxes(2, 3)

    def of_block(d_kv, block):
        q_KMC, d_out_KMC, log_sum_KM, delta_KM, block_ranges, key_blocks, count = block

        def add(turn, sums):
            d_q, d_k, d_v = sums
            key_block = key_blocks[turn]
            scores = _scores(q_KMC, k[key_block], block_ranges, key_block, scale, softcap)
            weights = jnp.exp(scores - log_sum_KM[:, None])
            d_scores = weights * (_exact("ksc,kmc->ksm", v[key_block], d_out_KMC) - delta_KM[:, None])
            if softcap is not None:  # what is masked has no weight
                d_scores *= 1 - jnp.square(jnp.where(scores > _MASKED, scores, 0) / softcap)
            d_scores = (d_scores * scale).astype(q.dtype)
            d_q += _exact("kcs,ksm->kcm", k_T[key_block], d_scores)
            d_k = d_k.at[key_block].add(_exact("ksm,kmc->ksc", d_scores, q_KMC))
            d_v = d_v.at[key_block].add(_exact("ksm,kmc->ksc", weights.astype(v.dtype), d_out_KMC))
            return d_q, d_k, d_v

        d_q_KCM, *d_kv = jax.lax.fori_loop(0, count, add, (_zeros_T(q_KMC), *d_kv))
        return tuple(d_kv), d_q_KCM.astype(q.dtype).swapaxes(1, 2)

    blocks = (q, d_out, log_sum, delta, ranges, *_key_blocks(ranges, len(k)))
    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    (d_k, d_v), d_q = jax.lax.scan(of_block, zeros, blocks)
    d_sinks = None if sinks is None else -jnp.sum(jnp.exp(sinks - log_sum) * delta, axis=0)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), d_sinks, None, None


_attend.defvjp(_attend_forward, _attend_backward)
