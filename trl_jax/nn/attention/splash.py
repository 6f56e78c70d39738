"""Attention over packed rows on TPUs, with JAX's splash attention and a dynamic block mask.

Splash attention passes its mask function one number per query and the position of each key. A range of keys is encoded
in one 32-bit number: its start in the high bits, its length in the low bits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trl_jax.mesh.mesh import TENSOR, on_each_device, platform
from trl_jax.nn.attention.inputs import SAVED, KeyRanges

BLOCK = 512  # queries and keys per block; larger blocks skip less, smaller ones take more iterations
_LANES = 128


def supports_splash(k_SKC: jax.Array, ranges: KeyRanges, longest: int) -> bool:
    """Whether the kernel applies: each query has one range, of at most `longest` keys, encoded in 32 bits."""
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
    """Attention `[N, H, C]`; `ranges` has an entry per query, of at most `longest` keys; `sinks` `[H]` one per head."""
    q_NHC = (q_NHC * jnp.asarray(scale, jnp.float32)).astype(q_NHC.dtype)
    by_head = [_pad(y).transpose(1, 0, 2) for y in (q_NHC, k_SKC, v_SKC)]
    within = jax.tree.map(_pad, ranges)

    def attend(q_HNC, k_KSC, v_KSC, sinks, ranges):
        return _attend(q_HNC, k_KSC, v_KSC, sinks, ranges, softcap, longest.bit_length())

    heads = PartitionSpec(TENSOR)
    attend = on_each_device(attend, (*[heads] * 4, PartitionSpec()), heads)
    out = attend(*by_head, sinks, within).transpose(1, 0, 2)[: len(q_NHC)]
    return jnp.where((ranges.end > ranges.first)[:, None, None], out, 0)


def _padded(length: int) -> int:
    """Round up to whole blocks, or to whole lanes if shorter than a block."""
    return -(-length // _block(length)) * _block(length)


def _block(length: int) -> int:
    return min(BLOCK, -(-length // _LANES) * _LANES)


def _pad(y: jax.Array) -> jax.Array:
    """Pad to whole blocks with zeros; as ranges, zeros mean that a query attends to nothing."""
    return jnp.pad(y, [(0, _padded(len(y)) - len(y))] + [(0, 0)] * (y.ndim - 1))


@cache
def _mask_function(bits: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The mask function; the low `bits` of an encoded range are its length."""

    def seen(ranges: jax.Array, keys: jax.Array) -> jax.Array:
        first = jax.lax.shift_right_logical(ranges, bits)
        return (keys >= first) & (keys < first + (ranges & ((1 << bits) - 1)))

    return seen


def _precision(dtype: jnp.dtype) -> AbstractContextManager:
    """bfloat16 products are exact in float32, and the TPU compiler rejects a higher precision for them."""
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
        mask_function=_mask_function(bits),
        interpret=platform() != "tpu",
    )


def _mask(needed: jax.Array, axis: int, ranges: jax.Array):
    """Block mask for iterating over keys (axis 1) or queries (axis 0): which blocks to compute, and which block to
    prefetch next."""
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
