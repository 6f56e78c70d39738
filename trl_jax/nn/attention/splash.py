"""Attention along packed rows on TPUs: JAX's splash attention, told which blocks of keys a block of queries sees.

Splash attention gets one number of each query and the place of each key; a range of keys is two numbers in one of 32
bits: where it begins, and how many they are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trl_jax.mesh.mesh import TENSOR
from trl_jax.nn.attention.ranges import SAVED, KeyRanges
from trl_jax.nn.platform import platform, undivided

BLOCK = 512  # of queries and of keys; a longer one skips less, a shorter one is a turn more
_LANES = 128


def splashes(k_SKC: jax.Array, ranges: KeyRanges, longest: int) -> bool:
    """Whether it can: queries see one range each, of at most `longest` keys, which fits into 32 bits."""
    return ranges.second is None and (_padded(len(k_SKC)) - 1).bit_length() + longest.bit_length() <= 32


def attend_splash(
    q_NHC: jax.Array,
    k_SKC: jax.Array,
    v_SKC: jax.Array,
    ranges: KeyRanges,
    *,
    longest: int,
    scale: jax.Array,
    softcap: float | None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Results `[N, H, C]` of queries on keys and values; `ranges` are of the queries, of at most `longest` keys, and
    `sinks` `[H]` of the heads."""
    q_NHC = (q_NHC * jnp.asarray(scale, jnp.float32)).astype(q_NHC.dtype)
    by_head = [_filled(y).transpose(1, 0, 2) for y in (q_NHC, k_SKC, v_SKC)]
    within = jax.tree.map(_filled, ranges)

    def attend(q_HNC, k_KSC, v_KSC, sinks, ranges):
        return _attend(q_HNC, k_KSC, v_KSC, sinks, ranges, softcap, longest.bit_length())

    heads = PartitionSpec(TENSOR)
    attend = undivided(attend, (*[heads] * 4, PartitionSpec()), heads)
    out = attend(*by_head, sinks, within).transpose(1, 0, 2)[: len(q_NHC)]
    return jnp.where((ranges.end > ranges.first)[:, None, None], out, 0)


def _padded(length: int) -> int:
    """Up to whole blocks; up to whole lanes where it is shorter than a block."""
    return -(-length // _block(length)) * _block(length)


def _block(length: int) -> int:
    return min(BLOCK, -(-length // _LANES) * _LANES)


def _filled(y: jax.Array) -> jax.Array:
    """Filled up to whole blocks with zeros, which as ranges are those of queries that see nothing."""
    return jnp.pad(y, [(0, _padded(len(y)) - len(y))] + [(0, 0)] * (y.ndim - 1))


@cache
def _seen(bits: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Whether keys at these places are seen; the lower `bits` of a range are how many it has."""

    def seen(ranges: jax.Array, keys: jax.Array) -> jax.Array:
        first = jax.lax.shift_right_logical(ranges, bits)
        return (keys >= first) & (keys < first + (ranges & ((1 << bits) - 1)))

    return seen


def _precision(dtype: jnp.dtype) -> AbstractContextManager:
    """Products of bfloat16 are exact in float32, and the TPUs' compiler refuses to be asked for it."""
    return jax.default_matmul_precision("bfloat16") if dtype == jnp.bfloat16 else nullcontext()


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(q, k, v, sinks, ranges, softcap, bits):
    with _precision(q.dtype):
        return _kernel(ranges, k.shape[1], softcap, bits)(q, k, v, sinks=sinks)


def _attend_forward(q, k, v, sinks, ranges, softcap, bits):
    kernel = _kernel(ranges, k.shape[1], softcap, bits)
    with _precision(q.dtype):
        return jax.vjp(lambda q, k, v, sinks: kernel(q, k, v, sinks=sinks), q, k, v, sinks)


def _attend_backward(softcap, bits, to_inputs, gradient):
    with _precision(gradient.dtype):
        return *to_inputs(gradient), None


_attend.defvjp(_attend_forward, _attend_backward)


def _kernel(ranges: KeyRanges, keys: int, softcap: float | None, bits: int):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    of_q, of_k = _block(len(ranges.first)), _block(keys)
    sizes = splash.BlockSizes(
        block_q=of_q, block_kv=of_k, block_q_dkv=of_q, block_kv_dkv=of_k, block_q_dq=of_q, block_kv_dq=of_k
    )
    needed = ranges.blocks(of_q, of_k, keys // of_k)
    in_one = jax.lax.shift_left(ranges.first, bits) | jnp.maximum(ranges.end - ranges.first, 0)
    by_query, by_key = _mask(needed, 1, in_one), _mask(needed, 0, in_one)
    return splash.SplashAttentionKernel(
        by_query,
        by_query,
        by_key,
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=False,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=SAVED,
        mask_function=_seen(bits),
        interpret=platform() != "tpu",
    )


def _mask(needed: jax.Array, axis: int, ranges: jax.Array):
    """The blocks that the kernel walks along, of keys (axis 1) or of queries (axis 0): which it computes, and which it
    reads next in the turn of each."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as masks

    count = needed.shape[axis]
    numbers = jax.lax.broadcasted_iota(jnp.int32, needed.shape, axis)
    following = jax.lax.cummin(jnp.where(needed, numbers, count - 1), axis=axis, reverse=True)
    return masks.MaskInfo(
        data_next=following[None],
        mask_next=None,
        block_mask=needed.astype(jnp.int32)[None],
        partial_mask_blocks=None,
        q_sequence=ranges,
    )
