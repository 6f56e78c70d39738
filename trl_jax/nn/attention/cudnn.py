"""cuDNN flash attention on NVIDIA GPUs, for padded rows and for packed rows whose texts share no tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from trl_jax.core.outputs import Packed
from trl_jax.mesh.jax_internals import packed_attention
from trl_jax.mesh.mesh import TENSOR, on_each_device, platform
from trl_jax.nn.attention.inputs import SAVED

_AMPERE, _HOPPER = 8.0, 9.0  # minimum compute capability for padded rows and for packed rows
# JAX versions (from, before) whose internal call handles packed rows correctly, also with grouped heads. jax.nn does
# not expose it.
_PACKS, _UNTRIED = (0, 11, 2), (0, 13)
_HEADS = PartitionSpec(None, None, TENSOR)  # of `[R, T, H, C]`
_absent: float | None = None  # compute capability set by `compile_for`


def supports(q_RTHC: jax.Array) -> bool:
    """Whether the GPU supports these queries on padded rows."""
    _, length, _, channels = q_RTHC.shape
    return (
        supports_head_dim(channels, q_RTHC.dtype)
        and length % 2 == 0
        and platform() == "gpu"
        and _capability() >= _AMPERE
    )


def supports_packed(q_RTHC: jax.Array, packed: Packed) -> bool:
    """Whether the GPU supports these queries on packed rows: several texts per row, each contiguous and in order."""
    separate = packed.prompt is None and packed.context is None and packed.texts.places.shape[1] > 1
    here = supports_head_dim(q_RTHC.shape[-1], q_RTHC.dtype) and platform() == "gpu" and _capability() >= _HOPPER
    return separate and here and _packing() is not None


def supports_head_dim(channels: int, dtype: jnp.dtype | str) -> bool:
    """Whether cuDNN supports heads with this many channels in this dtype."""
    return jnp.dtype(dtype) == jnp.bfloat16 and channels % 8 == 0 and channels <= 128


def compile_for(capability: float) -> None:
    """From now on, compile for a GPU with this compute capability, which this machine need not have. (JAX's call would
    query the local GPU.)"""
    global _absent
    _absent, call = capability, _packing()
    if call is not None:
        call.check_compute_capability = lambda required: capability >= float(required)
        call.is_cuda_compute_capability_equal = lambda required: capability == float(required)


def _capability() -> float:
    """The compute capability; 0.0 for GPUs from other vendors."""
    if _absent is not None:
        return _absent
    major, _, minor = jax.local_devices(backend="gpu")[0].compute_capability.partition(".")  # AMD's is not a number
    return float(f"{major}.{minor or 0}") if major.isdecimal() else 0.0


def _packing() -> Any:
    """JAX's internal call for packed rows; None if this JAX version is not known to have a correct one."""
    return packed_attention() if _PACKS <= jax.__version_info__ < _UNTRIED else None


def attend_cudnn(
    q_RTHC: jax.Array,
    k_RTKC: jax.Array,
    v_RTKC: jax.Array,
    *,
    scale: float | jax.Array,
    lengths: jax.Array | None = None,
) -> jax.Array:
    """Causal attention, `[R, T, H, C]`; results past `lengths` int32 `[R]` are not computed.

    No mask is needed: real tokens never attend to right-padding, and cuDNN would compute a gradient of a mask.
    """
    if isinstance(scale, jax.Array):
        q_RTHC, scale = (q_RTHC * scale).astype(q_RTHC.dtype), 1.0

    def attend(q_RTHC, k_RTKC, v_RTKC, lengths):
        within = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
        return jax.nn.dot_product_attention(
            q_RTHC, k_RTKC, v_RTKC, scale=scale, is_causal=True, implementation="cudnn", **within
        )

    return on_each_device(attend, (*[_HEADS] * 3, PartitionSpec()), _HEADS)(q_RTHC, k_RTKC, v_RTKC, lengths)


def attend_cudnn_packed(
    q_RTHC: jax.Array, k_RTKC: jax.Array, v_RTKC: jax.Array, packed: Packed, *, scale: float | jax.Array
) -> jax.Array:
    """Causal attention within each text of packed rows, `[R, T, H, C]`; zeros between texts.

    The kernel neither reads nor writes the gaps between texts, nor their gradients, so inputs and results are masked
    there. For the backward pass, checkpoint policies save either all results of the kernel (`save_policy`) or, by name,
    its output.
    """
    call, length = _packing(), q_RTHC.shape[1]
    places = packed.texts.places
    starts, lengths = places[:, :, 0], jnp.sum(places < length, axis=2, dtype=jnp.int32)
    order = jnp.argsort(starts, axis=1)
    starts, lengths = (jnp.take_along_axis(y, order, axis=1) for y in (starts, lengths))
    sizes, offsets = (jnp.where(lengths > 0, y, -1).astype(jnp.int32) for y in (lengths, starts))
    offsets = jnp.pad(offsets, ((0, 0), (0, 1)), constant_values=-1)
    inside = (packed.first < length)[..., None, None]
    if isinstance(scale, jax.Array):
        q_RTHC, scale = (q_RTHC * scale).astype(q_RTHC.dtype), 1.0

    def attend(q_RTHC, k_RTKC, v_RTKC, sizes, offsets):
        places, mask = (sizes, sizes, offsets, offsets), call.MaskType.PADDING_CAUSAL
        return call.dot_product_attention(q_RTHC, k_RTKC, v_RTKC, None, None, *places, scale=scale, mask_type=mask)

    qkv = (jnp.where(inside, y, 0) for y in (q_RTHC, k_RTKC, v_RTKC))
    attend = on_each_device(attend, (*[_HEADS] * 3, PartitionSpec(), PartitionSpec()), _HEADS)
    out = jnp.where(inside, attend(*qkv, sizes, offsets), 0)
    return out if _sums_are_small(sizes, q_RTHC) else checkpoint_name(out, SAVED)


def save_policy(primitive: Any, *inputs: Any, **options: Any) -> bool:
    """Checkpoint policy: save what the kernel returns for packed rows, including the sums for its backward pass;
    otherwise the backward pass would run the kernel again. For padded rows, these results are larger than everything
    else in a layer and are not saved."""
    if not primitive.name.startswith("dot_product_attention_fwd"):
        return False
    queries, sizes = inputs[0], inputs[4]
    return sizes.ndim == 2 and _sums_are_small(sizes, queries)


def _sums_are_small(sizes_RX: jax.Array, q_RTHC: jax.Array) -> bool:
    """Whether the kernel's sums, a float32 per token, head and text of a row, take no more memory than its output."""
    return 2 * sizes_RX.shape[1] <= q_RTHC.shape[-1]
