"""Operations that sum an axis up, or run along it. Sums of half precision are taken in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _axes(axes):
    return None if axes is None or axes == () else axes


def _wide(x):
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


def _sum(x, axes=None, keepdim=False):
    return jnp.sum(_wide(x), _axes(axes), keepdims=keepdim)


def _mean(x, axes=None, keepdim=False):
    return jnp.mean(_wide(x), _axes(axes), keepdims=keepdim)


def _variance(x, axes=None, *, correction=1, keepdim=False):
    return jnp.var(_wide(x), _axes(axes), ddof=correction, keepdims=keepdim)


def _most(x, axis, keepdim=False):
    """The largest values and the first place of each, which alone has the gradient."""
    place = jnp.argmax(x, axis, keepdims=True)
    values = jnp.take_along_axis(x, place, axis)
    return (values, place) if keepdim else (jnp.squeeze(values, axis), jnp.squeeze(place, axis))


def _least(x, axis, keepdim=False):
    values, place = _most(-x, axis, keepdim)
    return -values, place


def _argmax(x, axis=None, keepdim=False):
    return jnp.argmax(x, axis, keepdims=keepdim)


def _argmin(x, axis=None, keepdim=False):
    return jnp.argmin(x, axis, keepdims=keepdim)


def _softmax(x, axis, half_to_float=False):
    del half_to_float
    return jax.nn.softmax(_wide(x), axis)


def _log_softmax(x, axis, half_to_float=False):
    del half_to_float
    return jax.nn.log_softmax(_wide(x), axis)


def _any(x, axis=None, keepdim=False):
    return jnp.any(x.astype(bool), axis, keepdims=keepdim)


def _all(x, axis=None, keepdim=False):
    return jnp.all(x.astype(bool), axis, keepdims=keepdim)


def _norm(x, p=2, axes=None, keepdim=False):
    return jnp.sum(jnp.abs(_wide(x)) ** p, _axes(axes), keepdims=keepdim) ** (1.0 / p)


def _cumsum(x, axis):
    return jnp.cumsum(_wide(x), axis)


def _cumprod(x, axis):
    return jnp.cumprod(_wide(x), axis)


OPERATIONS = {
    "aten.sum.default": _sum,
    "aten.sum.dim_IntList": _sum,
    "aten.mean.default": _mean,
    "aten.mean.dim": _mean,
    "aten.var.correction": _variance,
    "aten.std.correction": lambda x, axes=None, **how: jnp.sqrt(_variance(x, axes, **how)),
    "aten.amax.default": lambda x, axes=(), keepdim=False: jnp.max(x, _axes(axes), keepdims=keepdim),
    "aten.amin.default": lambda x, axes=(), keepdim=False: jnp.min(x, _axes(axes), keepdims=keepdim),
    "aten.max.default": jnp.max,
    "aten.min.default": jnp.min,
    "aten.max.dim": _most,
    "aten.min.dim": _least,
    "aten.argmax.default": _argmax,
    "aten.argmin.default": _argmin,
    "aten.any.default": _any,
    "aten.any.dim": _any,
    "aten.any.dims": _any,
    "aten.all.default": _all,
    "aten.all.dim": _all,
    "aten.prod.default": jnp.prod,
    "aten.prod.dim_int": lambda x, axis, keepdim=False: jnp.prod(x, axis, keepdims=keepdim),
    "aten.linalg_vector_norm.default": _norm,
    "aten.norm.Scalar": _norm,
    "aten.norm.ScalarOpt_dim": _norm,
    "aten.cumsum.default": _cumsum,
    "aten.cumprod.default": _cumprod,
    "aten.logcumsumexp.default": lambda x, axis: jax.lax.cumlogsumexp(_wide(x), axis % x.ndim),
    "aten.logsumexp.default": lambda x, axes, keepdim=False: jax.nn.logsumexp(_wide(x), axes, keepdims=keepdim),
    "aten._softmax.default": _softmax,
    "aten._log_softmax.default": _log_softmax,
}
