"""Attention over packed rows: choice of kernel, and a block-sparse implementation in plain XLA."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from trl_jax.core.outputs import BLOCK, Packed
from trl_jax.mesh.mesh import platform
from trl_jax.nn.attention.inputs import SAVED, AttentionInputs, KeyRanges, key_ranges, text_key_ranges
from trl_jax.nn.attention.splash import attend_splash, supports_splash
from trl_jax.nn.text_order import by_text

# Choice of kernel


def attend_packed(
    q_RTHC: jax.Array,
    k_RSKC: jax.Array,
    v_RSKC: jax.Array,
    inputs: AttentionInputs,
    *,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention `[R, T, H, C]` within packed rows; T must be a multiple of BLOCK.

    Tokens that attend to nothing get zeros. Reads scale, packed, window, ahead and striped of `inputs`; if tokens are
    striped, S counts those of all devices. `sinks` as in `attend_padded`.

    Raises:
        ValueError: T is not a multiple of BLOCK.
    """
    rows, length = q_RTHC.shape[:2]
    if length % BLOCK:
        raise ValueError(f"A packed row of {length} tokens is not a multiple of {BLOCK}: pad it.")
    ranges = key_ranges(inputs, k_RSKC.shape[1])
    k_SKC, v_SKC = (y.reshape(-1, *y.shape[2:]) for y in (k_RSKC, v_RSKC))
    scores = {"scale": inputs.scale, "softcap": softcap, "sinks": sinks}
    return _run_kernel(q_RTHC, k_SKC, v_SKC, ranges, k_RSKC.shape[1], **scores)


def attend_by_text(
    q_RTHC: jax.Array,
    k_RTKC: jax.Array,
    v_RTKC: jax.Array,
    inputs: AttentionInputs,
    *,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """As `attend_packed`, if `inputs.packed.texts` is set. The keys and values of each text are made contiguous (shared
    ones are copied), so that each query attends to a single range even with a context or a window."""
    texts = inputs.packed.texts
    rows, count, length = texts.places.shape
    missing = -rows * count * length % BLOCK
    k_SKC, v_SKC = (
        jnp.pad(by_text(y, texts).reshape(-1, *y.shape[2:]), ((0, missing), (0, 0), (0, 0))) for y in (k_RTKC, v_RTKC)
    )
    scores = {"scale": inputs.scale, "softcap": softcap, "sinks": sinks}
    return _run_kernel(q_RTHC, k_SKC, v_SKC, text_key_ranges(inputs), length, **scores)


def attend_rows(
    q_RTHC: jax.Array,
    k_RTKC: jax.Array,
    v_RTKC: jax.Array,
    inputs: AttentionInputs,
    *,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention over rows of one text each, of any length, with the packed kernels. `inputs` as in
    `attend_packed`, but with `lengths` instead of `packed`; results past these lengths are zeros."""
    rows, length = q_RTHC.shape[:2]
    missing = -length % BLOCK
    places = jnp.broadcast_to(jnp.arange(length + missing, dtype=jnp.int32), (rows, length + missing))
    inside = places < (length if inputs.lengths is None else inputs.lengths[:, None])
    packed = Packed(jnp.where(inside, 0, length + missing), jnp.where(inside, places + 1, length + missing), None)
    if inputs.window is not None and inputs.window.ndim:
        inputs = inputs._replace(window=jnp.pad(inputs.window, ((0, 0), (0, missing)), constant_values=1))
    if inputs.ahead is not None:
        inputs = inputs._replace(ahead=jnp.pad(inputs.ahead, ((0, 0), (0, missing))))
    qkv = (jnp.pad(y, ((0, 0), (0, missing), (0, 0), (0, 0))) for y in (q_RTHC, k_RTKC, v_RTKC))
    return attend_packed(*qkv, inputs._replace(packed=packed), softcap=softcap, sinks=sinks)[:, :length]


def seen_both_ways(packed: Packed) -> Packed:
    """Extend the ranges of causal texts so that tokens also attend to later tokens. Texts must not share tokens."""
    length = packed.first.shape[-1]
    last = jnp.diff(packed.first, axis=-1, append=-1) != 0
    ends = jax.lax.cummin(jnp.where(last, jnp.arange(1, length + 1), length), axis=last.ndim - 1, reverse=True)
    return packed._replace(end=ends)


def _run_kernel(q_RTHC, k_SKC, v_SKC, ranges: KeyRanges, longest: int, **scores) -> jax.Array:
    """Run the kernel for the platform; a range has at most `longest` keys."""
    qkv = q_RTHC.reshape(-1, *q_RTHC.shape[2:]), k_SKC, v_SKC
    if platform() == "tpu" and supports_splash(k_SKC, ranges, longest):
        out = attend_splash(*qkv, ranges, longest=longest, **scores)
    else:
        out = attend_blocks(*qkv, ranges, **scores)
    return out.reshape(q_RTHC.shape)


# Block-sparse attention in plain XLA: blocks without any visible key are skipped in both passes

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
    """Attention `[N, H, C]`; N and S must be multiples of BLOCK, and `ranges` has an entry per query.

    `sinks` `[H]` as in `attend_padded`: the softmax's sum of each head has an extra term `exp(sink)`.
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
    """For each block of queries: the key blocks, those that any query attends to first and in order, `[N, count]`, and
    the number of these `[N]`."""
    needed = jax.tree.map(lambda y: y[:, :BLOCK], ranges).blocks(BLOCK, BLOCK, count)  # same ranges for all heads
    order = jnp.argsort(~needed, axis=1, stable=True).astype(jnp.int32)
    return order, jnp.sum(needed, axis=1, dtype=jnp.int32)


def _scores(q_KMC, k_KBC, ranges, key_block, scale, softcap):
    """Scores `[K, B, M]` of one block of keys and one block of queries; _MASKED where a key is not attended to."""
    keys = key_block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    scores = _exact("ksc,kmc->ksm", k_KBC, q_KMC) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    return jnp.where(ranges.see(keys).T, scores, _MASKED)


def _forward(q, k, v, sinks_KM, ranges, scale, softcap):
    """Results `[N, K, M, C]` in the dtype of `v`, and the log-sum-exp `[N, K, M]`."""
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

        # The initial maximum is above a masked score, so masked keys have weight exp(-inf) even before any visible key.
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
    """Float32 accumulator `[K, C, M]` for a block of queries."""
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
            if softcap is not None:  # masked scores have no weight
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
