"""Operations that move elements about or make new arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.nn.aten.pointwise import number


def _view(x, shape):
    return jnp.reshape(x, shape)


def _expand(x, shape, *, implicit=False):
    del implicit
    new = len(shape) - x.ndim
    wanted = [x.shape[i - new] if size == -1 else size for i, size in enumerate(shape)]
    return jnp.broadcast_to(x, wanted)


def _slice(x, axis=0, start=None, end=None, step=1):
    index = [slice(None)] * x.ndim
    index[axis] = slice(start, None if end is None else min(end, x.shape[axis]), step)
    return x[tuple(index)]


def _slice_scatter(x, values, axis=0, start=None, end=None, step=1):
    index = [slice(None)] * x.ndim
    index[axis] = slice(start, None if end is None else min(end, x.shape[axis]), step)
    return x.at[tuple(index)].set(values.astype(x.dtype))


def _select(x, axis, index):
    return jnp.take(x, index + x.shape[axis] if index < 0 else index, axis=axis, mode="clip")


def _select_scatter(x, values, axis, index):
    place = [slice(None)] * x.ndim
    place[axis] = index
    return x.at[tuple(place)].set(values.astype(x.dtype))


def _split(x, size, axis=0):
    sizes = [size] * (x.shape[axis] // size) + ([x.shape[axis] % size] if x.shape[axis] % size else [])
    return _split_with_sizes(x, sizes, axis)


def _split_with_sizes(x, sizes, axis=0):
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(_slice(x, axis, end - size, end) for end, size in zip(ends, sizes, strict=True))


def _unbind(x, axis=0):
    return tuple(_select(x, axis, i) for i in range(x.shape[axis]))


def _squeeze(x, axes=None):
    axes = range(x.ndim) if axes is None else axes if isinstance(axes, tuple) else (axes,)
    return jnp.squeeze(x, tuple(axis for axis in axes if x.shape[axis] == 1))


def _cat(arrays, axis=0):
    kept = [x for x in arrays if x.shape != (0,)]  # torch lets an empty vector stand among arrays of any rank
    return jnp.concatenate(kept, axis)


def _repeat(x, times):
    return jnp.tile(x, times)


def _pad(x, pads, value=0.0):
    """Pads come from the last axis on, two for each; a negative one cuts."""
    widths = [(0, 0)] * x.ndim
    for i in range(len(pads) // 2):
        widths[x.ndim - 1 - i] = (pads[2 * i], pads[2 * i + 1])
    x = x[tuple(slice(max(-a, 0), size - max(-b, 0)) for (a, b), size in zip(widths, x.shape, strict=True))]
    return jnp.pad(x, [(max(a, 0), max(b, 0)) for a, b in widths], constant_values=number(value))


def _diagonal(x, offset=0, first=0, second=1):
    return jnp.diagonal(x, offset, first, second)


def _arange(start, end, step=1):
    return jnp.arange(start, end, step)


def _full(shape, value):
    return jnp.full(shape, number(value))


def _full_like(x, value):
    return jnp.full(x.shape, number(value))


def _unfold(x, axis, size, step):
    """Windows of an axis, their elements along a new last one."""
    starts = jnp.arange((x.shape[axis] - size) // step + 1) * step
    windows = jnp.take(x, starts[:, None] + jnp.arange(size), axis=axis)
    return jnp.moveaxis(windows, axis % x.ndim + 1, -1)


def _view_as_complex(x):
    return jax.lax.complex(x[..., 0], x[..., 1])


def _view_as_real(x):
    return jnp.stack([x.real, x.imag], -1)


OPERATIONS = {
    "aten.view_as_complex.default": _view_as_complex,
    "aten.view_as_real.default": _view_as_real,
    "aten.view.default": _view,
    "aten.reshape.default": _view,
    "aten._unsafe_view.default": _view,
    "aten.expand.default": _expand,
    "aten.permute.default": jnp.transpose,
    "aten.transpose.int": jnp.swapaxes,
    "aten.t.default": jnp.transpose,
    "aten.unsqueeze.default": jnp.expand_dims,
    "aten.squeeze.default": _squeeze,
    "aten.squeeze.dim": _squeeze,
    "aten.squeeze.dims": _squeeze,
    "aten.slice.Tensor": _slice,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select.int": _select,
    "aten.select_scatter.default": _select_scatter,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split_with_sizes,
    "aten.unbind.int": _unbind,
    "aten.cat.default": _cat,
    "aten.stack.default": lambda arrays, axis=0: jnp.stack(arrays, axis),
    "aten.repeat.default": _repeat,
    "aten.roll.default": lambda x, shifts, axes=None: jnp.roll(x, shifts, axes or None),
    "aten.flip.default": lambda x, axes: jnp.flip(x, axes),
    "aten.constant_pad_nd.default": _pad,
    "aten.diagonal.default": _diagonal,
    "aten.unfold.default": _unfold,
    "aten.tril.default": jnp.tril,
    "aten.triu.default": jnp.triu,
    "aten.arange.start_step": _arange,
    "aten.arange.default": lambda end: jnp.arange(end),
    "aten.full.default": _full,
    "aten.full_like.default": _full_like,
    "aten.new_full.default": lambda x, shape, value: _full(shape, value),
    "aten.scalar_tensor.default": lambda value: jnp.asarray(number(value)),
    "aten.zeros.default": jnp.zeros,
    "aten.ones.default": jnp.ones,
    "aten.new_zeros.default": lambda x, shape: jnp.zeros(shape),
    "aten.new_ones.default": lambda x, shape: jnp.ones(shape),
    "aten.eye.default": jnp.eye,
    "aten.eye.m": jnp.eye,
    # Memory that a program asks for and then fills; what it holds until then is nobody's business.
    "aten.empty.memory_format": jnp.zeros,
    "aten.empty_permuted.default": lambda shape, order: jnp.zeros(shape),
    "aten.new_empty.default": lambda x, shape: jnp.zeros(shape),
}
