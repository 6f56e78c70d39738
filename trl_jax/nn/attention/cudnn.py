"""Attention on NVIDIA GPUs by cuDNN's flash attention: on padded rows, and on packed rows whose texts share nothing."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from trl_jax.core.outputs import Packed
from trl_jax.mesh.mesh import TENSOR
from trl_jax.nn.attention.ranges import SAVED
from trl_jax.nn.platform import platform, undivided

_AMPERE, _HOPPER = 8.0, 9.0  # the least compute capabilities that it runs on, on padded rows and on packed ones
# Releases of JAX whose own call tells it rightly where texts lie, if heads share keys, too; jax.nn's does not tell it.
_PACKS, _UNTRIED = (0, 11, 2), (0, 13)
_CALL = "jax._src.cudnn.fused_attention_stablehlo"
_HEADS = PartitionSpec(None, None, TENSOR)  # of `[R, T, H, C]`
_absent: float | None = None  # the capability of `compile_for`


def attends(q_RTHC: jax.Array) -> bool:
    """Whether the GPUs that there are have it for these queries."""
    _, length, _, channels = q_RTHC.shape
    return takes(channels, q_RTHC.dtype) and length % 2 == 0 and platform() == "gpu" and _capability() >= _AMPERE


def attends_packed(q_RTHC: jax.Array, packed: Packed) -> bool:
    """Whether they have it for these queries along packed rows: of several texts, each of whose tokens lie in order."""
    apart = packed.prompt is None and packed.context is None and packed.texts.places.shape[1] > 1
    here = takes(q_RTHC.shape[-1], q_RTHC.dtype) and platform() == "gpu" and _capability() >= _HOPPER
    return apart and here and _packing() is not None


def takes(channels: int, dtype: jnp.dtype | str) -> bool:
    """Whether it takes heads of so many channels."""
    return jnp.dtype(dtype) == jnp.bfloat16 and channels % 8 == 0 and channels <= 128


def compile_for(capability: float) -> None:
    """Choose, from here on, what a GPU of this compute capability has, which this machine lacks: its programs are only
    compiled. JAX's call would ask the GPU that there is."""
    global _absent
    _absent, call = capability, _packing()
    if call is not None:
        call.check_compute_capability = lambda wanted: capability >= float(wanted)
        call.is_cuda_compute_capability_equal = lambda wanted: capability == float(wanted)


def _capability() -> float:
    """0.0 of a GPU that is none of NVIDIA's."""
    if _absent is not None:
        return _absent
    major, _, minor = jax.local_devices(backend="gpu")[0].compute_capability.partition(".")  # AMD's is no number
    return float(f"{major}.{minor or 0}") if major.isdecimal() else 0.0


def _packing() -> Any:
    """JAX's call that takes packed rows; None where this release is not known to have one that is right."""
    if not _PACKS <= jax.__version_info__ < _UNTRIED:
        return None
    try:
        return importlib.import_module(_CALL)
    except ImportError:
        return None


def attend_cudnn(
    q_RTHC: jax.Array,
    k_RTKC: jax.Array,
    v_RTKC: jax.Array,
    *,
    scale: float | jax.Array,
    lengths: jax.Array | None = None,
) -> jax.Array:
    """Causal attention, `[R, T, H, C]`; what is behind `lengths` int32 `[R]` is not computed.

    No mask is passed: what is to the right of a text is seen by pads alone, and of a mask cuDNN would write a gradient.
    """
    if isinstance(scale, jax.Array):
        q_RTHC, scale = (q_RTHC * scale).astype(q_RTHC.dtype), 1.0

    def attend(q_RTHC, k_RTKC, v_RTKC, lengths):
        within = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
        return jax.nn.dot_product_attention(
            q_RTHC, k_RTKC, v_RTKC, scale=scale, is_causal=True, implementation="cudnn", **within
        )

    return undivided(attend, (*[_HEADS] * 3, PartitionSpec()), _HEADS)(q_RTHC, k_RTKC, v_RTKC, lengths)


def attend_cudnn_packed(
    q_RTHC: jax.Array, k_RTKC: jax.Array, v_RTKC: jax.Array, packed: Packed, *, scale: float | jax.Array
) -> jax.Array:
    """Causal attention within each text of packed rows, `[R, T, H, C]`; zeros where there is no text.

    What lies between texts is neither read nor written, gradients neither: it is masked on both sides. A checkpoint
    policy finds what the backward pass is to keep: all that the kernel gave (`keeps`), or the result by its name.
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
    attend = undivided(attend, (*[_HEADS] * 3, PartitionSpec(), PartitionSpec()), _HEADS)
    out = jnp.where(inside, attend(*qkv, sizes, offsets), 0)
    return out if _sums_are_small(sizes, q_RTHC) else checkpoint_name(out, SAVED)


def keeps(primitive: Any, *inputs: Any, **options: Any) -> bool:
    """A checkpoint policy: what the kernel gave of packed rows, with the sums that its backward pass wants, for which
    it would run twice. Results of padded rows are larger than the rest of a layer together."""
    if not primitive.name.startswith("dot_product_attention_fwd"):
        return False
    queries, sizes = inputs[0], inputs[4]
    return sizes.ndim == 2 and _sums_are_small(sizes, queries)


def _sums_are_small(sizes_RX: jax.Array, q_RTHC: jax.Array) -> bool:
    """Whether the kernel's sums, a float32 for each token, head and text of a row, take no more than its result."""
    return 2 * sizes_RX.shape[1] <= q_RTHC.shape[-1]
