"""Matrix products, convolutions, normalisation: what takes the time."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def _addmm(bias, a, b, *, beta=1, alpha=1):
    product = a @ b
    return (product if alpha == 1 else alpha * product) + (bias if beta == 1 else beta * bias)


def _convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """`x` is [N, in, ...], `weight` [out, in / groups, ...]."""
    if transposed or any(output_padding):
        raise ValueError("The exported model has a transposed convolution, which trl_jax has no counterpart of.")
    y = jax.lax.conv_general_dilated(
        x,
        weight.astype(x.dtype),
        window_strides=stride,
        padding=[(pad, pad) for pad in padding],
        rhs_dilation=dilation,
        feature_group_count=groups,
    )
    return y if bias is None else y + bias.reshape(-1, *[1] * (x.ndim - 2))


def _layer_norm(x, shape, weight, bias, eps):
    """The normalised array, its mean, and one over its standard deviation."""
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axes, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide - mean), axes, keepdims=True) + eps)
    y = (wide - mean) * rstd
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, mean, rstd


def _rms_norm(x, shape, weight, eps):
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    wide = x.astype(jnp.float32)
    eps = jnp.finfo(x.dtype).eps if eps is None else eps
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axes, keepdims=True) + eps)
    return (wide * rstd if weight is None else wide * rstd * weight), rstd


def _grouped(x, weight, ends):
    """Rows `[S, in]` times the matrix of their group, `weight` `[groups, in, out]`; a group's rows end at `ends`."""
    sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)
    return jax.lax.ragged_dot(x, weight.astype(x.dtype), sizes)


def _fourier(x, axes, normalization, forward):
    """`normalization` divides by nothing (0), by the root of the size (1) or by the size (2), whichever the way."""
    transform = jnp.fft.fftn if forward else jnp.fft.ifftn
    unscaled = transform(x, axes=axes, norm="backward" if forward else "forward")
    size = math.prod(x.shape[axis] for axis in axes)
    return unscaled / (1, math.sqrt(size), size)[normalization]


OPERATIONS = {
    "aten._fft_c2c.default": _fourier,
    "aten.mm.default": jnp.matmul,
    "aten.bmm.default": jnp.matmul,
    "aten.matmul.default": jnp.matmul,
    "aten.mv.default": jnp.matmul,
    "aten.dot.default": jnp.matmul,
    "aten.addmm.default": _addmm,
    "aten.baddbmm.default": _addmm,
    "aten.convolution.default": _convolution,
    "aten.native_layer_norm.default": _layer_norm,
    "aten._fused_rms_norm.default": _rms_norm,
    "aten._grouped_mm.default": _grouped,
    "transformers.grouped_mm_fallback.default": _grouped,
}
