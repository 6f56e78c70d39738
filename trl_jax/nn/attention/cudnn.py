"""Attention on padded rows on NVIDIA GPUs: cuDNN's flash attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.nn.platform import platform

_AMPERE = 8.0  # the least compute capability that it runs on


def attends(q_RTHC: jax.Array) -> bool:
    """Whether the GPUs that there are have it for these queries."""
    _, length, _, channels = q_RTHC.shape
    return takes(channels, q_RTHC.dtype) and length % 2 == 0 and platform() == "gpu" and _capable()


def takes(channels: int, dtype: jnp.dtype | str) -> bool:
    """Whether it takes heads of so many channels."""
    return jnp.dtype(dtype) == jnp.bfloat16 and channels % 8 == 0 and channels <= 128


def _capable() -> bool:
    major, _, minor = jax.local_devices(backend="gpu")[0].compute_capability.partition(".")  # AMD's is no number
    return major.isdecimal() and float(f"{major}.{minor or 0}") >= _AMPERE


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
    within = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    return jax.nn.dot_product_attention(
        q_RTHC, k_RTKC, v_RTKC, scale=scale, is_causal=True, implementation="cudnn", **within
    )
