"""transformers' Adafactor: of a matrix it keeps the average squares of rows and of columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from trl_jax.core.torch_param_layout import TorchParamLayout

_EPS = 1e-30  # added to squares
_DECAY = 0.8  # the average of t steps forgets t**-0.8 of itself
_LARGEST = 1.0  # bound of an update's root mean square


class FactoredState(NamedTuple):
    """Attributes:
        count: steps taken.
        rows: for each of torch's tensors, average squares of its rows `[..., out]`; of a vector, of each number.
        columns: for each matrix, average squares of its columns `[..., in]`.
    """

    count: jax.Array
    rows: dict[str, jax.Array]
    columns: dict[str, jax.Array]


def scale_by_adafactor(layout: TorchParamLayout) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern 2018, arXiv:1804.04235), neither with a relative step nor scaled by parameters.

    Averages and bounds are those of torch's tensors, which `layout` finds in the arrays; optax's rule takes each array
    for a tensor.
    """

    def init(params):
        tensors = _joined(params, layout)
        matrices = {name: x for name, x in tensors.items() if _is_matrix(name, x, layout)}
        rows = {name: jnp.zeros(x.shape[:-1] if name in matrices else x.shape) for name, x in tensors.items()}
        columns = {name: jnp.zeros((*x.shape[:-2], x.shape[-1])) for name, x in matrices.items()}
        return FactoredState(jnp.zeros((), jnp.int32), rows, columns)

    def update(updates, state, params=None):
        del params
        count = optax.safe_increment(state.count)
        share = count.astype(jnp.float32) ** -_DECAY
        rows, columns, steps = {}, {}, {}
        for name, g in _joined(updates, layout).items():
            square = jnp.square(g) + _EPS
            if name in state.columns:
                rows[name] = _towards(state.rows[name], jnp.mean(square, axis=-1), share)
                columns[name] = _towards(state.columns[name], jnp.mean(square, axis=-2), share)
                of_row = rows[name] / jnp.mean(rows[name], axis=-1, keepdims=True)
                step = g * jax.lax.rsqrt(of_row)[..., None] * jax.lax.rsqrt(columns[name])[..., None, :]
            else:
                rows[name] = _towards(state.rows[name], square, share)
                step = g * jax.lax.rsqrt(rows[name])
            steps[name] = _bounded(step, first=name in layout.stacked)
        return _split(steps, updates, layout), FactoredState(count, rows, columns)

    return optax.GradientTransformation(init, update)


def _towards(average: jax.Array, values: jax.Array, share: jax.Array) -> jax.Array:
    return (1 - share) * average + share * values


def _bounded(step: jax.Array, first: int) -> jax.Array:
    """Scale to a root mean square, over the axes from `first` on, of at most _LARGEST."""
    size = jnp.sqrt(jnp.mean(jnp.square(step), axis=tuple(range(first, step.ndim)), keepdims=True))
    return step / jnp.maximum(size / _LARGEST, 1)


def _is_matrix(path: str, array: jax.Array, layout: TorchParamLayout) -> bool:
    return array.ndim - (path in layout.stacked) >= 2


def _axis(path: str, array: jax.Array, layout: TorchParamLayout) -> int:
    """The axis of outputs, along which arrays are joined to a tensor."""
    return -2 if _is_matrix(path, array, layout) else -1


def _members(paths: Iterable[str], layout: TorchParamLayout) -> dict[str, list[str]]:
    """First path -> all paths, for each of torch's tensors."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(layout.joined.get(path, path), []).append(path)
    return {paths[0]: paths for paths in groups.values()}


def _joined(arrays: Mapping[str, jax.Array], layout: TorchParamLayout) -> dict[str, jax.Array]:
    return {
        name: jnp.concatenate([arrays[path] for path in paths], _axis(name, arrays[name], layout))
        for name, paths in _members(arrays, layout).items()
    }


def _split(
    tensors: Mapping[str, jax.Array], arrays: Mapping[str, jax.Array], layout: TorchParamLayout
) -> dict[str, jax.Array]:
    """Split the tensors into arrays of these shapes."""
    found = {}
    for name, paths in _members(arrays, layout).items():
        axis = _axis(name, arrays[name], layout)
        ends = list(itertools.accumulate(arrays[path].shape[axis] for path in paths))
        found |= dict(zip(paths, jnp.split(tensors[name], ends[:-1], axis), strict=True))
    return found
