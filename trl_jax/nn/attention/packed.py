"""Attention over packed rows."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from trl_jax.core.outputs import BLOCK, Packed
from trl_jax.nn.attention.inputs import AttentionInputs, Striped
from trl_jax.nn.attention.ranges import SAVED, KeyRanges, by_text
from trl_jax.nn.attention.splash import attend_splash, splashes
from trl_jax.nn.platform import platform

# ----------------------------------------------------------------------------------------------------
# Attention along packed rows: the ranges of keys that their tokens see, and the kernel for the platform.


def attend_packed(
    q_RTHC: jax.Array,
    k_RSKC: jax.Array,
    v_RSKC: jax.Array,
    inputs: AttentionInputs,
    *,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Results `[R, T, H, C]` of queries on keys and values of as many packed rows; T is a multiple of BLOCK.

    A token that sees nothing gets zeros. Of `inputs` it takes scale, packed, window and striped; where tokens are
    striped, S counts those of all devices. `sinks` as in `attend_padded`.

    Raises:
        ValueError: rows of another length.
    """
    rows, length = q_RTHC.shape[:2]
    if length % BLOCK:
        raise ValueError(f"A packed row of {length} tokens is not a multiple of {BLOCK}: pad it to one.")
    ranges = _key_ranges(inputs.packed, inputs.window, inputs.striped, k_RSKC.shape[1])
    k_SKC, v_SKC = (y.reshape(-1, *y.shape[2:]) for y in (k_RSKC, v_RSKC))
    scores = {"scale": inputs.scale, "softcap": softcap, "sinks": sinks}
    return _along(q_RTHC, k_SKC, v_SKC, ranges, k_RSKC.shape[1], **scores)


def attend_by_text(
    q_RTHC: jax.Array,
    k_RTKC: jax.Array,
    v_RTKC: jax.Array,
    inputs: AttentionInputs,
    *,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """As `attend_packed`, where `inputs.packed` has a view of its texts as rows: keys and values of each text are put
    together, those that texts share into each of them. So a query sees one range, a context or a window or not."""
    texts = inputs.packed.texts
    rows, count, length = texts.places.shape
    slots = texts.rows[:, 0]  # of the first text that a token is in
    missing = -rows * count * length % BLOCK
    k_SKC, v_SKC = (
        jnp.pad(by_text(y, texts).reshape(-1, *y.shape[2:]), ((0, missing), (0, 0), (0, 0))) for y in (k_RTKC, v_RTKC)
    )
    place = slots + jnp.arange(rows, dtype=jnp.int32)[:, None] * (count * length)
    nearest = slots % length  # tokens of the text before the query's
    if inputs.window is not None:
        nearest = jnp.minimum(nearest, inputs.window - 1)
    inside = slots < count * length
    ranges = KeyRanges(*(jnp.where(inside, y, 0).reshape(-1) for y in (place - nearest, place + 1)))
    scores = {"scale": inputs.scale, "softcap": softcap, "sinks": sinks}
    return _along(q_RTHC, k_SKC, v_SKC, ranges, length, **scores)


def attend_rows(
    q_RTHC: jax.Array,
    k_RTKC: jax.Array,
    v_RTKC: jax.Array,
    inputs: AttentionInputs,
    *,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of rows of one text each, as packed rows attend; of any length. `inputs` as in `attend_packed`,
    with `lengths`, behind which results are zeros, in the place of `packed`."""
    rows, length = q_RTHC.shape[:2]
    missing = -length % BLOCK
    places = jnp.broadcast_to(jnp.arange(length + missing, dtype=jnp.int32), (rows, length + missing))
    inside = places < (length if inputs.lengths is None else inputs.lengths[:, None])
    packed = Packed(jnp.where(inside, 0, length + missing), jnp.where(inside, places + 1, length + missing), None)
    if inputs.window is not None and inputs.window.ndim:
        inputs = inputs._replace(window=jnp.pad(inputs.window, ((0, 0), (0, missing)), constant_values=1))
    qkv = (jnp.pad(y, ((0, 0), (0, missing), (0, 0), (0, 0))) for y in (q_RTHC, k_RTKC, v_RTKC))
    return attend_packed(*qkv, inputs._replace(packed=packed), softcap=softcap, sinks=sinks)[:, :length]


def seen_both_ways(packed: Packed) -> Packed:
    """For texts whose tokens see what comes after them, too. Texts must share nothing."""
    length = packed.first.shape[-1]
    last = jnp.diff(packed.first, axis=-1, append=-1) != 0
    ends = jax.lax.cummin(jnp.where(last, jnp.arange(1, length + 1), length), axis=last.ndim - 1, reverse=True)
    return packed._replace(end=ends)


def _along(q_RTHC, k_SKC, v_SKC, ranges: KeyRanges, longest: int, **scores) -> jax.Array:
    """By the kernel for the platform; a range has at most `longest` keys."""
    qkv = q_RTHC.reshape(-1, *q_RTHC.shape[2:]), k_SKC, v_SKC
    if platform() == "tpu" and splashes(k_SKC, ranges, longest):
        out = attend_splash(*qkv, ranges, longest=longest, **scores)
    else:
        out = attend_blocks(*qkv, ranges, **scores)
    return out.reshape(q_RTHC.shape)


def _key_ranges(packed: Packed, window: jax.Array | None, striped: Striped | None, length: int) -> KeyRanges:
    """`[N]`, places counted along all rows, one behind the other and each with `length` keys."""
    rows, queries = packed.first.shape
    offset = jnp.arange(rows, dtype=jnp.int32)[:, None] * length
    first, end = ((y + offset).reshape(-1) for y in (packed.first, packed.end))
    context = None
    if packed.context is not None:
        context = tuple((y + offset).reshape(-1) for y in (packed.context, packed.context_end))
    if window is None:
        return KeyRanges(first, end) if context is None else KeyRanges(*context, first, end)
    window = window.reshape(-1) if window.ndim else window
    blocks = jnp.arange(rows * queries // BLOCK) if striped is None else striped.blocks(rows, queries // BLOCK)
    place = (blocks[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)).reshape(-1)
    nearest, last = jnp.maximum(first, place - window + 1), place + jnp.minimum(end - place, window)
    if context is not None:  # a branch's first token is next to its context's last one
        begin, branch = context
        return KeyRanges(jnp.maximum(begin, branch + (place - first) - window + 1), branch, nearest, last)
    if packed.prompt is None:
        return KeyRanges(nearest, last)
    # An answer before its prompt: next to the answer's first token is the prompt's first, but its last is the nearest.
    prompt = (packed.prompt + offset).reshape(-1)
    before, position = place < prompt, end - 1 - place
    second = prompt + jnp.maximum(position - window + 1, 0)
    return KeyRanges(nearest, jnp.where(before, jnp.minimum(last, prompt), last), jnp.where(before, second, end), end)


# ----------------------------------------------------------------------------------------------------
# Attention along packed rows in plain XLA, block by block: blocks of which nothing is seen are skipped, both ways.


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
