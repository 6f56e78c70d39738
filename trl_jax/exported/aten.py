"""ATen operations in JAX, and the interpreter that runs an exported program."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The interpreter: runs one JAX function per node, in order


_NARROW = {"int64": "int32", "float64": "float32", "uint64": "uint32", "complex128": "complex64"}


def run(
    program: Program,
    params: dict[str, jax.Array],
    rows: jax.Array,
    *,
    remat: bool = False,
    key: jax.Array | None = None,
) -> jax.Array:
    """The output of the program: scores `[R, 1]` or logits `[R, T, V]`.

    Args:
        params: by the names in `program.parameters`.
        rows: int32 `[2, R, T]`, token ids and mask.
        remat: save only the values that pass between layers, and recompute the rest in the backward pass.
        key: for random operations; None if the program has none.
    """
    values: dict[str, Any] = {
        name: jax.lax.stop_gradient(params[path]) if path in program.frozen else params[path]
        for name, path in program.parameters.items()
    }
    values |= {name: jnp.asarray(array) for name, array in program.constants.items()}
    values[program.input] = rows
    for number, piece in enumerate(program.pieces()):
        piece_key = None if key is None else jax.random.fold_in(key, number)
        values |= _run_piece(piece, values, piece_key, remat and piece.layer is not None)
    return values[program.output]


def _run_piece(piece: Piece, values: dict[str, Any], key: jax.Array | None, remat: bool) -> dict[str, Any]:
    """The values that later pieces read. Python numbers are not traced, because shapes must be static."""
    numbers, arrays = _numbers_and_arrays({name: values[name] for name in piece.needs})
    new_numbers: dict[str, Any] = {}

    def compute(arrays: dict[str, Any], key: jax.Array | None) -> dict[str, Any]:
        results = _run_nodes(piece.nodes, {**numbers, **arrays}, key)
        of_piece, new_arrays = _numbers_and_arrays({name: results[name] for name in piece.gives})
        new_numbers.update(of_piece)
        return new_arrays

    return (jax.checkpoint(compute) if remat else compute)(arrays, key) | new_numbers


def _numbers_and_arrays(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return numbers, {name: value for name, value in values.items() if name not in numbers}


def _run_nodes(nodes: tuple[Node, ...], values: dict[str, Any], key: jax.Array | None) -> dict[str, Any]:
    for number, node in enumerate(nodes):
        args = _filled(node.args, values)
        kwargs = {name: _filled(value, values) for name, value in node.kwargs.items()}
        if node.op in RANDOM:
            kwargs["key"] = jax.random.fold_in(key, number)
        values[node.name] = _cast(OPERATIONS[node.op](*args, **kwargs), node.dtype)
    return values


def _filled(value: Any, values: dict[str, Any]) -> Any:
    if isinstance(value, Ref):
        return values[value.name]
    if isinstance(value, tuple):
        return tuple(_filled(entry, values) for entry in value)
    return value


def _cast(value: Any, dtype: str | tuple | None) -> Any:
    """Cast to the dtypes recorded in the node, in the widths that JAX computes with."""
    if dtype is None:
        return value
    if isinstance(dtype, tuple):
        return tuple(_cast(part, kind) for part, kind in zip(value, dtype, strict=True))
    return jnp.asarray(value).astype(_NARROW.get(dtype, dtype))


# A program as plain data, without JAX


@dataclass(frozen=True)
class Ref:
    """Refers to the value of an earlier node in the arguments of a node."""

    name: str


@dataclass(frozen=True)
class Node:
    """One operation.

    op: the name of an ATen operation with its overload ("aten.add.Tensor"), or of a function on Python numbers
    ("operator.mul"). dtype: of the result, or a tuple for several results; None for Python numbers. layer: the call of
    a numbered submodule that it belongs to; nodes of one layer are recomputed together.
    """

    name: str
    op: str
    args: tuple
    kwargs: dict[str, Any]
    dtype: str | tuple[str | None, ...] | None
    layer: str | None

    def reads(self) -> Iterator[str]:
        """Names of the values that it reads."""
        return _names((self.args, tuple(self.kwargs.values())))


@dataclass(frozen=True)
class Piece:
    """Consecutive nodes of one layer. `needs`: earlier values that they read; `gives`: values that are read later."""

    nodes: tuple[Node, ...]
    layer: str | None
    needs: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """A function from int32 `[2, R, T]` (token ids and mask) to scores `[R, 1]` or logits `[R, T, V]`.

    input, output: names of these values. parameters: value name -> the parameter's name in the exported model;
        parameters in `frozen` get no gradient. constants: value name -> array.
    """

    nodes: tuple[Node, ...]
    parameters: dict[str, str]
    frozen: frozenset[str]
    constants: dict[str, np.ndarray] = field(repr=False)
    input: str
    output: str

    def pieces(self) -> list[Piece]:
        """The nodes, split where the layer changes."""
        groups = [(layer, tuple(nodes)) for layer, nodes in groupby(self.nodes, lambda node: node.layer)]
        pieces, needed = [], {self.output}
        for layer, nodes in reversed(groups):
            defined = {node.name for node in nodes}
            read = {name for node in nodes for name in node.reads()}
            pieces.append(Piece(nodes, layer, tuple(sorted(read - defined)), tuple(sorted(defined & needed))))
            needed |= read
        return pieces[::-1]

    def unread(self) -> frozenset[str]:
        """Names of the parameters that no node reads; of a tied parameter, any of its names."""
        read = {self.output}.union(*(node.reads() for node in self.nodes))
        used = {name for value, name in self.parameters.items() if value in read}
        return frozenset(self.parameters.values()) - used


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, tuple):
        for entry in value:
            yield from _names(entry)


# Operations that move elements or create arrays


def _expand(x, shape, *, implicit=False):
    del implicit
    new = len(shape) - x.ndim
    target = [x.shape[i - new] if size == -1 else size for i, size in enumerate(shape)]
    return jnp.broadcast_to(x, target)


def _at(x, axis, index):
    """The index of `index` along an axis."""
    place = [slice(None)] * x.ndim
    place[axis] = index
    return tuple(place)


def _range(x, axis, start, end, step):
    return _at(x, axis, slice(start, None if end is None else min(end, x.shape[axis]), step))


def _slice(x, axis=0, start=None, end=None, step=1):
    return x[_range(x, axis, start, end, step)]


def _slice_scatter(x, values, axis=0, start=None, end=None, step=1):
    return x.at[_range(x, axis, start, end, step)].set(values.astype(x.dtype))


def _select(x, axis, index):
    return jnp.take(x, index + x.shape[axis] if index < 0 else index, axis=axis, mode="clip")


def _select_scatter(x, values, axis, index):
    return x.at[_at(x, axis, index)].set(values.astype(x.dtype))


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
    nonempty = [x for x in arrays if x.shape != (0,)]  # torch allows an empty vector among arrays of any rank
    return jnp.concatenate(nonempty, axis)


def _pad(x, pads, value=0.0):
    """Two pad widths per axis, starting with the last axis; negative widths crop."""
    widths = [(0, 0)] * x.ndim
    for i in range(len(pads) // 2):
        widths[x.ndim - 1 - i] = (pads[2 * i], pads[2 * i + 1])
    x = x[tuple(slice(max(-a, 0), size - max(-b, 0)) for (a, b), size in zip(widths, x.shape, strict=True))]
    return jnp.pad(x, [(max(a, 0), max(b, 0)) for a, b in widths], constant_values=number(value))


def _full(shape, value):
    return jnp.full(shape, number(value))


def _full_like(x, value):
    return jnp.full(x.shape, number(value))


def _unfold(x, axis, size, step):
    """Sliding windows of an axis, with their elements along a new last axis."""
    starts = jnp.arange((x.shape[axis] - size) // step + 1) * step
    windows = jnp.take(x, starts[:, None] + jnp.arange(size), axis=axis)
    return jnp.moveaxis(windows, axis % x.ndim + 1, -1)


def _view_as_complex(x):
    return jax.lax.complex(x[..., 0], x[..., 1])


def _view_as_real(x):
    return jnp.stack([x.real, x.imag], -1)


SHAPES = {
    "aten.view_as_complex.default": _view_as_complex,
    "aten.view_as_real.default": _view_as_real,
    "aten.view.default": jnp.reshape,
    "aten.reshape.default": jnp.reshape,
    "aten._unsafe_view.default": jnp.reshape,
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
    "aten.stack.default": jnp.stack,
    "aten.repeat.default": jnp.tile,
    "aten.roll.default": lambda x, shifts, axes=None: jnp.roll(x, shifts, axes or None),
    "aten.flip.default": jnp.flip,
    "aten.constant_pad_nd.default": _pad,
    "aten.diagonal.default": jnp.diagonal,
    "aten.unfold.default": _unfold,
    "aten.tril.default": jnp.tril,
    "aten.triu.default": jnp.triu,
    "aten.arange.start_step": jnp.arange,
    "aten.arange.default": jnp.arange,
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
    # Uninitialized memory, which the program fills before reading it
    "aten.empty.memory_format": jnp.zeros,
    "aten.empty_permuted.default": lambda shape, order: jnp.zeros(shape),
    "aten.new_empty.default": lambda x, shape: jnp.zeros(shape),
}


# Gather and scatter operations


def _embedding(weight, ids, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    """As in torch, the row `padding_idx` gets no gradient."""
    del scale_grad_by_freq, sparse
    rows = jnp.take(weight, ids, axis=0, mode="clip")
    if padding_idx < 0:
        return rows
    return jnp.where((ids == padding_idx)[..., None], jax.lax.stop_gradient(rows), rows)


def _places(indices, ndim: int) -> tuple:
    """In torch, None selects a whole axis; in JAX, it adds an axis."""
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
    """`x` cropped to the size of the index along every other axis."""
    sizes = [x.shape[i] if i == axis % x.ndim else index.shape[i] for i in range(x.ndim)]
    return x[tuple(slice(size) for size in sizes)]


def _gather(x, axis, index, *, sparse_grad=False):
    del sparse_grad
    return jnp.take_along_axis(_like_index(x, axis, index), index, axis, mode="clip")


def _along(axis, index) -> tuple:
    """One index array per axis for the elements that `index` selects along `axis`."""
    grid = jnp.meshgrid(*(jnp.arange(size) for size in index.shape), indexing="ij", sparse=True)
    return tuple(index if i == axis % index.ndim else places for i, places in enumerate(grid))


def _scatter(x, axis, index, source):
    if isinstance(source, int | float):
        return x.at[_along(axis, index)].set(source)
    return x.at[_along(axis, index)].set(_like_index(source, 0, index)[: index.shape[0]].astype(x.dtype))


def _scatter_add(x, axis, index, source):
    return x.at[_along(axis, index)].add(_like_index(source, 0, index)[: index.shape[0]].astype(x.dtype))


def _index_add(x, axis, index, source, *, alpha=1):
    return x.at[_at(x, axis, index)].add(alpha * source)


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
    """Counts of elements in `bins` equal bins from `low` to `high`; elements outside are not counted. If both are 0,
    the bins span the data; a range of width 0 is widened by 1 on either side, as in torch."""
    if low == high == 0:
        low, high = jnp.min(x), jnp.max(x)
        low, high = low - (low == high), high + (low == high)
    elif low == high:
        low, high = low - 1, high + 1
    place = jnp.minimum(jnp.floor((x - low) * (bins / (high - low))).astype(jnp.int32), bins - 1)
    inside = (x >= low) & (x <= high)
    return jnp.zeros(bins, x.dtype).at[jnp.where(inside, place, bins)].add(1, mode="drop")


INDEXING = {
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


# Operations on Python numbers: sizes, and values computed from them during tracing


def _size(x: Any, axis: int | None = None) -> Any:
    return x.shape if axis is None else x.shape[axis]


def _assert(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"The rows do not fit the exported program: {message}.")


_NAMES = "add sub mul floordiv truediv mod neg pow eq ne lt le gt ge and_ or_ not_ getitem".split()
NUMBERS = {f"operator.{name}": getattr(operator, name) for name in _NAMES} | {
    "aten.sym_size.int": _size,
    "aten.sym_size.default": _size,
    "aten.sym_numel.default": lambda x: math.prod(x.shape),
    "aten._assert_scalar.default": _assert,
    "torch.sym_max": max,
    "torch.sym_min": min,
    "torch.sym_float": float,
    "torch.sym_int": int,
    "torch.sym_not": operator.not_,
    "torch.sym_ite": lambda condition, yes, no: yes if condition else no,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.trunc": math.trunc,
    "math.pow": math.pow,
    "math.sqrt": math.sqrt,
}


# Elementwise operations. At kinks, gradients are those of torch.


_LARGEST = jnp.iinfo(jnp.int32).max


def number(value, operand=None):
    """A Python number as JAX can represent it: an integer within 32 bits, or a float if `operand` is a float array."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if operand is not None and jnp.issubdtype(jnp.result_type(operand), jnp.floating):
        return float(value)
    return max(-_LARGEST - 1, min(_LARGEST, value))


def _add(a, b, *, alpha=1):
    return a + number(b, a) if alpha == 1 else a + alpha * number(b, a)


def _sub(a, b, *, alpha=1):
    return a - number(b, a) if alpha == 1 else a - alpha * number(b, a)


def _rsub(a, b, alpha=1):
    return number(b, a) - (a if alpha == 1 else alpha * a)


def _div(a, b, *, rounding_mode=None):
    if rounding_mode is None:
        return jnp.true_divide(a, b)
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    whole = jnp.issubdtype(jnp.result_type(a, b), jnp.integer)
    return jax.lax.div(*jnp.broadcast_arrays(a, jnp.asarray(b, a.dtype))) if whole else jnp.trunc(a / b)


def _power(base, exponent):
    if isinstance(exponent, int | float) and float(exponent).is_integer() and abs(exponent) < 16:
        return jax.lax.integer_pow(base, int(exponent))
    return jnp.sqrt(base) if exponent == 0.5 else jnp.power(base, exponent)


def _clamp(x, low=None, high=None):
    """Values at the bounds pass the gradient through, as in torch."""
    if low is not None:
        x = jnp.where(x < low, low, x)
    return x if high is None else jnp.where(x > high, high, x)


def _gelu(x, *, approximate="none"):
    return jax.nn.gelu(x.astype(jnp.float32), approximate=approximate == "tanh")


def _silu(x):
    return jax.nn.silu(x.astype(jnp.float32))


def _softplus(x, beta=1, threshold=20):
    return jnp.where(x * beta > threshold, x, jax.nn.softplus(x * beta) / beta)


def _leaky_relu(x, slope=0.01):
    return jnp.where(x > 0, x, slope * x)


def _elu(x, alpha=1, scale=1, input_scale=1):
    return jnp.where(x > 0, scale * x, scale * alpha * jnp.expm1(jnp.minimum(x, 0) * input_scale))


def _polar(length, angle):
    return jax.lax.complex(length * jnp.cos(angle), length * jnp.sin(angle))


def _logical(function):
    return lambda *arrays: function(*(jnp.asarray(x).astype(bool) for x in arrays))


def _where(condition, yes, no):
    return jnp.where(condition, number(yes), number(no))


def _sign(x):
    return jax.lax.stop_gradient(jnp.sign(x))


def _with_overloads(name: str, function, overloads: str) -> dict:
    return {f"aten.{name}.{overload}": function for overload in overloads.split()}


_ONE = {  # of one array
    "abs": jnp.abs, "acos": jnp.arccos, "asin": jnp.arcsin, "atan": jnp.arctan, "bitwise_not": jnp.invert,
    "ceil": jnp.ceil, "cos": jnp.cos, "cosh": jnp.cosh, "erf": jax.scipy.special.erf, "exp": jnp.exp,
    "expm1": jnp.expm1, "floor": jnp.floor, "isinf": jnp.isinf, "isnan": jnp.isnan, "log": jnp.log,
    "log1p": jnp.log1p, "log2": jnp.log2, "log10": jnp.log10, "logical_not": _logical(jnp.logical_not),
    "neg": jnp.negative, "reciprocal": jnp.reciprocal, "relu": jax.nn.relu, "round": jnp.round,
    "rsqrt": jax.lax.rsqrt, "sigmoid": jax.nn.sigmoid, "sign": _sign, "silu": _silu, "sin": jnp.sin,
    "sinh": jnp.sinh, "sqrt": jnp.sqrt, "square": jnp.square, "tan": jnp.tan, "tanh": jnp.tanh, "trunc": jnp.trunc,
    "gelu": _gelu, "softplus": _softplus, "leaky_relu": _leaky_relu, "elu": _elu, "clamp": _clamp,
    "hardtanh": lambda x, low=-1.0, high=1.0: jnp.where(x <= low, low, jnp.where(x >= high, high, x)),
    "clamp_min": _clamp, "clamp_max": lambda x, high: _clamp(x, None, high),
    "clone": lambda x: x, "_to_copy": lambda x: x, "alias": lambda x: x, "lift_fresh_copy": lambda x: x,
    "detach": jax.lax.stop_gradient, "zeros_like": jnp.zeros_like, "ones_like": jnp.ones_like,
    "empty_like": jnp.zeros_like,
}  # fmt: skip
_TWO = {  # of two arrays, or an array and a number
    "mul": lambda a, b: a * number(b, a), "eq": lambda a, b: jnp.equal(a, number(b, a)),
    "ne": lambda a, b: jnp.not_equal(a, number(b, a)), "lt": lambda a, b: jnp.less(a, number(b, a)),
    "le": lambda a, b: jnp.less_equal(a, number(b, a)), "gt": lambda a, b: jnp.greater(a, number(b, a)),
    "ge": lambda a, b: jnp.greater_equal(a, number(b, a)), "remainder": jnp.mod, "fmod": jnp.fmod,
    "bitwise_and": lambda a, b: jnp.bitwise_and(a, number(b, a)), "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor, "__rshift__": jnp.right_shift, "__lshift__": jnp.left_shift,
    "bitwise_left_shift": jnp.left_shift, "bitwise_right_shift": jnp.right_shift,
}  # fmt: skip
POINTWISE = {
    **{name: function for op, f in _ONE.items() for name, function in _with_overloads(op, f, "default").items()},
    **{
        name: function
        for op, f in _TWO.items()
        for name, function in _with_overloads(op, f, "Tensor Scalar Tensor_Scalar").items()
    },
    **_with_overloads("add", _add, "Tensor Scalar"),
    **_with_overloads("sub", _sub, "Tensor Scalar"),
    **_with_overloads("rsub", _rsub, "Tensor Scalar"),
    **_with_overloads("div", _div, "Tensor Scalar Tensor_mode Scalar_mode"),
    **_with_overloads("floor_divide", jnp.floor_divide, "default Scalar"),
    **_with_overloads("pow", _power, "Tensor_Scalar"),
    **_with_overloads("pow", jnp.power, "Tensor_Tensor Scalar"),
    **_with_overloads("clamp", _clamp, "Tensor"),
    **_with_overloads("minimum", jnp.minimum, "default"),
    **_with_overloads("maximum", jnp.maximum, "default"),
    **_with_overloads("polar", _polar, "default"),
    **_with_overloads("atan2", jnp.arctan2, "default"),
    **_with_overloads("logical_and", _logical(jnp.logical_and), "default"),
    **_with_overloads("logical_or", _logical(jnp.logical_or), "default"),
    **_with_overloads("logical_xor", _logical(jnp.logical_xor), "default"),
    **_with_overloads("where", _where, "self ScalarSelf ScalarOther Scalar"),
    **_with_overloads("masked_fill", lambda x, mask, value: jnp.where(mask, number(value), x), "Scalar Tensor"),
    **_with_overloads("copy", lambda x, source: jnp.broadcast_to(source, x.shape), "default"),
}


# Matrix products, convolutions and normalization


def _addmm(bias, a, b, *, beta=1, alpha=1):
    product = a @ b
    return (product if alpha == 1 else alpha * product) + (bias if beta == 1 else beta * bias)


def _convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """`x` is [N, in, ...], `weight` [out, in / groups, ...]."""
    if transposed or any(output_padding):
        raise ValueError("The exported model has a transposed convolution, which trl_jax does not support.")
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
    """The normalized array, the mean, and the reciprocal of the standard deviation."""
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
    """Rows `[S, in]` times the matrix of their group in `weight` `[groups, in, out]`; groups of rows end at `ends`."""
    sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)
    return jax.lax.ragged_dot(x, weight.astype(x.dtype), sizes)


def _fourier(x, axes, normalization, forward):
    """`normalization` divides by 1 (0), sqrt(size) (1) or size (2), in either direction."""
    transform = jnp.fft.fftn if forward else jnp.fft.ifftn
    unscaled = transform(x, axes=axes, norm="backward" if forward else "forward")
    size = math.prod(x.shape[axis] for axis in axes)
    return unscaled / (1, math.sqrt(size), size)[normalization]


PRODUCTS = {
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


# Linear recurrences over an axis


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear_recurrence(decay: jax.Array, drive: jax.Array, axis: int) -> jax.Array:
    """h[t] = decay[t] h[t - 1] + drive[t] along an axis, with h[-1] = 0; all arrays have the same shape.

    The gradient is the same recurrence, backward: g[t] = dh[t] + decay[t + 1] g[t + 1] is the gradient of drive[t], and
    g[t] h[t - 1] the gradient of decay[t].
    """
    return _scan(decay, drive, axis, reverse=False)


def _scan(decay: jax.Array, drive: jax.Array, axis: int, reverse: bool) -> jax.Array:
    """A sequential scan on CPUs; elsewhere an associative scan, in log T passes, because one position is too little
    work."""
    how = {"axis": axis, "reverse": reverse}
    return jax.lax.platform_dependent(decay, drive, cpu=partial(_in_turn, **how), default=partial(_joined, **how))


def _in_turn(decay: jax.Array, drive: jax.Array, *, axis: int, reverse: bool) -> jax.Array:
    def step(state: jax.Array, row: tuple) -> tuple[jax.Array, jax.Array]:
        state = row[0] * state + row[1]
        return state, state

    rows = jnp.moveaxis(decay, axis, 0), jnp.moveaxis(drive, axis, 0)
    return jnp.moveaxis(jax.lax.scan(step, jnp.zeros_like(rows[1][0]), rows, reverse=reverse)[1], 0, axis)


def _joined(decay: jax.Array, drive: jax.Array, *, axis: int, reverse: bool) -> jax.Array:
    def join(first: Any, second: Any) -> Any:
        return first[0] * second[0], second[0] * first[1] + second[1]

    return jax.lax.associative_scan(join, (decay, drive), axis=axis, reverse=reverse)[1]


def _forward(decay: jax.Array, drive: jax.Array, axis: int) -> tuple[jax.Array, tuple]:
    states = _scan(decay, drive, axis, reverse=False)
    return states, (decay, states)


def _backward(axis: int, residuals: tuple, pull: jax.Array) -> tuple[jax.Array, jax.Array]:
    decay, states = residuals
    drive = _scan(_moved(decay, axis, -1), pull, axis, reverse=True)
    return drive * _moved(states, axis, 1), drive


def _moved(x: jax.Array, axis: int, places: int) -> jax.Array:
    """Shift values by `places` along the axis, filling with zeros."""
    length = x.shape[axis]
    ends = jnp.zeros_like(jax.lax.slice_in_dim(x, 0, 1, axis=axis))
    if places > 0:
        return jnp.concatenate([ends, jax.lax.slice_in_dim(x, 0, length - 1, axis=axis)], axis)
    return jnp.concatenate([jax.lax.slice_in_dim(x, 1, length, axis=axis), ends], axis)


linear_recurrence.defvjp(_forward, _backward)

RECURRENCES = {"trl_jax.linear_recurrence.default": linear_recurrence}


# Reductions and scans along an axis. Half-precision sums are accumulated in float32.


def _axes(axes):
    return None if axes is None or axes == () else axes


def _wide(x):
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


def _variance(x, axes=None, *, correction=1, keepdim=False):
    return jnp.var(_wide(x), _axes(axes), ddof=correction, keepdims=keepdim)


def _most(x, axis, keepdim=False):
    """The largest values and their first positions; only these get a gradient."""
    place = jnp.argmax(x, axis, keepdims=True)
    values = jnp.take_along_axis(x, place, axis)
    return (values, place) if keepdim else (jnp.squeeze(values, axis), jnp.squeeze(place, axis))


def _least(x, axis, keepdim=False):
    values, place = _most(-x, axis, keepdim)
    return -values, place


def _reduction(function, convert=lambda x: x):
    """jnp's reduction with torch's arguments, of the converted array."""
    return lambda x, axes=None, keepdim=False: function(convert(x), _axes(axes), keepdims=keepdim)


def _as_bool(x):
    return x.astype(bool)


def _norm(x, p=2, axes=None, keepdim=False):
    """torch.linalg.vector_norm. The gradient at a zero vector is 0, as in torch."""
    size, axes = jnp.abs(_wide(x)), _axes(axes)
    if p in (math.inf, -math.inf):
        return (jnp.max if p > 0 else jnp.min)(size, axes, keepdims=keepdim)
    if p == 0:
        return jnp.sum(size != 0, axes, keepdims=keepdim).astype(size.dtype)
    total = jnp.sum(size**p, axes, keepdims=keepdim)
    return jnp.where(total == 0, 0, jnp.where(total == 0, 1, total) ** (1.0 / p))


_sum, _mean = _reduction(jnp.sum, _wide), _reduction(jnp.mean, _wide)
_any, _all = _reduction(jnp.any, _as_bool), _reduction(jnp.all, _as_bool)
REDUCTIONS = {
    "aten.sum.default": _sum,
    "aten.sum.dim_IntList": _sum,
    "aten.mean.default": _mean,
    "aten.mean.dim": _mean,
    "aten.var.correction": _variance,
    "aten.std.correction": lambda x, axes=None, **how: jnp.sqrt(_variance(x, axes, **how)),
    "aten.amax.default": _reduction(jnp.max),
    "aten.amin.default": _reduction(jnp.min),
    "aten.max.default": jnp.max,
    "aten.min.default": jnp.min,
    "aten.max.dim": _most,
    "aten.min.dim": _least,
    "aten.argmax.default": _reduction(jnp.argmax),
    "aten.argmin.default": _reduction(jnp.argmin),
    "aten.any.default": _any,
    "aten.any.dim": _any,
    "aten.any.dims": _any,
    "aten.all.default": _all,
    "aten.all.dim": _all,
    "aten.prod.default": jnp.prod,
    "aten.prod.dim_int": _reduction(jnp.prod),
    "aten.linalg_vector_norm.default": _norm,
    "aten.norm.Scalar": _norm,
    "aten.norm.ScalarOpt_dim": _norm,
    "aten.cumsum.default": lambda x, axis: jnp.cumsum(_wide(x), axis),
    "aten.cumprod.default": lambda x, axis: jnp.cumprod(_wide(x), axis),
    "aten.logcumsumexp.default": lambda x, axis: jax.lax.cumlogsumexp(_wide(x), axis % x.ndim),
    "aten.logsumexp.default": _reduction(jax.nn.logsumexp, _wide),
    "aten._softmax.default": lambda x, axis, half_to_float=False: jax.nn.softmax(_wide(x), axis),
    "aten._log_softmax.default": lambda x, axis, half_to_float=False: jax.nn.log_softmax(_wide(x), axis),
}


# Operations that draw random numbers; each takes a `key`


def _dropout(x, rate, train=True, *, key):
    """The values, dropped ones set to zero and the others scaled up, and the mask of kept values."""
    if not train or rate == 0.0:
        return x, jnp.ones(x.shape, bool)
    mask = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(mask, x / (1.0 - rate), 0) if rate < 1.0 else jnp.zeros_like(x), mask


def _bernoulli(x, probability=None, *, key):
    return jax.random.bernoulli(key, x if probability is None else probability, x.shape)


RNG = {
    "aten.native_dropout.default": _dropout,
    "aten.bernoulli.p": _bernoulli,
    "aten.bernoulli.default": _bernoulli,
    "aten.rand.default": lambda shape, *, key: jax.random.uniform(key, shape),
    "aten.rand_like.default": lambda x, *, key: jax.random.uniform(key, x.shape),
    "aten.randn.default": lambda shape, *, key: jax.random.normal(key, shape),
    "aten.randn_like.default": lambda x, *, key: jax.random.normal(key, x.shape),
}


# All operations, by their name in a program


RANDOM = RNG  # these take a `key` in addition to their arguments
OPERATIONS = POINTWISE | SHAPES | INDEXING | REDUCTIONS | RECURRENCES | PRODUCTS | NUMBERS | RNG
