"""Attention along a stream on TPUs: JAX's splash attention, told which blocks of keys a block of queries sees.

Splash attention gets one number of each query and the place of each key; a run of keys is two numbers of sixteen bits
in one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trl_jax.core.layer_gather import TENSOR
from trl_jax.nn.key_ranges import SAVED, KeyRanges
from trl_jax.nn.platform import platform

BLOCK = 512  # of queries and of keys; a longer one skips less, a shorter one is a turn more
_LANES = 128
_PLACES = 1 << 16


def splashes(k: jax.Array, runs: KeyRanges) -> bool:
    """Whether it can: queries see one run each, and places along the keys `[S, K, C]` fit into sixteen bits."""
    return runs.second is None and _padded(len(k)) < _PLACES


def attend_splash(
    q: jax.Array, k: jax.Array, v: jax.Array, runs: KeyRanges, *, scale: jax.Array, softcap: float | None
) -> jax.Array:
    """Queries `[N, H, C]` on keys and values `[S, K, C]`; `runs` are of the queries."""
    q = (q * jnp.asarray(scale, jnp.float32)).astype(q.dtype)
    by_head = [_filled(y).transpose(1, 0, 2) for y in (q, k, v)]
    within = jax.tree.map(_filled, runs)

    def attend(q, k, v, runs):
        return _attend(q, k, v, runs, softcap)

    divided = set(jax.sharding.get_abstract_mesh().auto_axes)  # by the compiler, which divides no kernel
    if divided:
        heads = PartitionSpec(TENSOR)
        places = {"in_specs": (heads, heads, heads, PartitionSpec()), "out_specs": heads}
        attend = jax.shard_map(attend, **places, axis_names=divided, check_vma=False)
    out = attend(*by_head, within).transpose(1, 0, 2)[: len(q)]
    return jnp.where((runs.end > runs.first)[:, None, None], out, 0)


def _padded(length: int) -> int:
    """To whole blocks; to whole lanes what is shorter than one."""
    return -(-length // _block(length)) * _block(length)


def _block(length: int) -> int:
    return min(BLOCK, -(-length // _LANES) * _LANES)


def _filled(y: jax.Array) -> jax.Array:
    """Up to whole blocks, with zeros: as runs, those of queries that see nothing."""
    return jnp.pad(y, [(0, _padded(len(y)) - len(y))] + [(0, 0)] * (y.ndim - 1))


def _seen(runs: jax.Array, keys: jax.Array) -> jax.Array:
    return (keys >= jax.lax.shift_right_logical(runs, 16)) & (keys < (runs & (_PLACES - 1)))


def _precision(dtype: jnp.dtype) -> AbstractContextManager:
    """Products of bfloat16 are exact in float32, and the TPUs' compiler refuses to be asked for it."""
    return jax.default_matmul_precision("bfloat16") if dtype == jnp.bfloat16 else nullcontext()


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, runs, softcap):
    with _precision(q.dtype):
        return _kernel(runs, k.shape[1], softcap)(q, k, v)


def _attend_forward(q, k, v, runs, softcap):
    with _precision(q.dtype):
        return jax.vjp(_kernel(runs, k.shape[1], softcap), q, k, v)


def _attend_backward(softcap, to_inputs, gradient):
    with _precision(gradient.dtype):
        return *to_inputs(gradient), None


_attend.defvjp(_attend_forward, _attend_backward)


def _kernel(runs: KeyRanges, keys: int, softcap: float | None):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    of_q, of_k = _block(len(runs.first)), _block(keys)
    sizes = splash.BlockSizes(
        block_q=of_q, block_kv=of_k, block_q_dkv=of_q, block_kv_dkv=of_k, block_q_dq=of_q, block_kv_dq=of_k
    )
    needed = runs.blocks(of_q, of_k, keys // of_k)
    packed = jax.lax.shift_left(runs.first, 16) | runs.end
    by_query, by_key = _mask(needed, 1, packed), _mask(needed, 0, packed)
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
        mask_function=_seen,
        interpret=platform() != "tpu",
    )


def _mask(needed: jax.Array, axis: int, packed: jax.Array):
    """What the kernel walks along: blocks of keys (1) or of queries (0), in whose turn is read what is needed next."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as masks

    count = needed.shape[axis]
    numbers = jax.lax.broadcasted_iota(jnp.int32, needed.shape, axis)
    following = jax.lax.cummin(jnp.where(needed, numbers, count - 1), axis=axis, reverse=True)
    return masks.MaskInfo(
        data_next=following[None],
        mask_next=None,
        block_mask=needed.astype(jnp.int32)[None],
        partial_mask_blocks=None,
        q_sequence=packed,
    )
