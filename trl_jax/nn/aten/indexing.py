"""Operations that read or write at places which are themselves computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _embedding(weight, ids, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    """The row `padding_idx` gets no gradient, as in torch."""
    del scale_grad_by_freq, sparse
    rows = jnp.take(weight, ids, axis=0, mode="clip")
    if padding_idx < 0:
        return rows
    return jnp.where((ids == padding_idx)[..., None], jax.lax.stop_gradient(rows), rows)


def _places(indices, ndim: int) -> tuple:
    """torch's None takes a whole axis, JAX's adds one."""
    full = tuple(indices) + (None,) * (ndim - len(indices))
    return tuple(slice(None) if index is None else index for index in full)


def _index(x, indices):
    return x[_places(indices, x.ndim)]


def _index_put(x, indices, values, accumulate=False):
    place = x.at[_places(indices, x.ndim)]
    values = jnp.asarray(values).astype(x.dtype)
    return place.add(values) if accumulate else place.set(values)


def _index_select(x, axis, index):
    return jnp.take(x, index, axis=axis, mode="clip")


def _like_index(x, axis, index):
    """`x` cut, in every axis but one, to the size that the index has there."""
    sizes = [x.shape[i] if i == axis % x.ndim else index.shape[i] for i in range(x.ndim)]
    return x[tuple(slice(size) for size in sizes)]


def _gather(x, axis, index, *, sparse_grad=False):
    del sparse_grad
    return jnp.take_along_axis(_like_index(x, axis, index), index, axis, mode="clip")


def _along(axis, index) -> tuple:
    """Index arrays which, axis by axis, name the place that `index` names along `axis`."""
    grid = jnp.meshgrid(*(jnp.arange(size) for size in index.shape), indexing="ij", sparse=True)
    return tuple(index if i == axis % index.ndim else places for i, places in enumerate(grid))


def _scatter(x, axis, index, source):
    if isinstance(source, int | float):
        return x.at[_along(axis, index)].set(source)
    return x.at[_along(axis, index)].set(_like_index(source, 0, index)[: index.shape[0]].astype(x.dtype))


def _scatter_add(x, axis, index, source):
    return x.at[_along(axis, index)].add(_like_index(source, 0, index)[: index.shape[0]].astype(x.dtype))


def _index_add(x, axis, index, source, *, alpha=1):
    place = [slice(None)] * x.ndim
    place[axis] = index
    return x.at[tuple(place)].add(alpha * source)


def _sort(x, axis=-1, descending=False):
    order = jnp.argsort(x, axis=axis, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, axis), order


def _stable_sort(x, *, stable=True, dim=-1, descending=False):
    del stable
    return _sort(x, dim, descending)


def _topk(x, count, axis=-1, largest=True, is_sorted=True):
    del is_sorted
    x = jnp.moveaxis(x, axis, -1)
    values, places = jax.lax.top_k(x if largest else -x, count)
    values = values if largest else -values
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(places, -1, axis)


def _histc(x, bins=100, low=0, high=0):
    """How many elements fall into each of `bins` equal parts of `low` to `high`; outside ones into none."""
    place = jnp.minimum(jnp.floor((x - low) * (bins / (high - low))).astype(jnp.int32), bins - 1)
    inside = (x >= low) & (x <= high)
    return jnp.zeros(bins, x.dtype).at[jnp.where(inside, place, bins)].add(1, mode="drop")


OPERATIONS = {
    "aten.embedding.default": _embedding,
    "aten.index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten._unsafe_index.Tensor": _index,
    "aten.index_select.default": _index_select,
    "aten.index_add.default": _index_add,
    "aten.gather.default": _gather,
    "aten.scatter.src": _scatter,
    "aten.scatter.value": _scatter,
    "aten.scatter_add.default": _scatter_add,
    "aten.sort.default": _sort,
    "aten.sort.stable": _stable_sort,
    "aten.argsort.default": lambda x, axis=-1, descending=False: _sort(x, axis, descending)[1],
    "aten.topk.default": _topk,
    "aten.histc.default": _histc,
}
