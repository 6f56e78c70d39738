"""Linear maps and embeddings, LoRA, dropout, grouped matrix products, and quantized weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trl_jax.mesh.mesh import platform

# Linear maps and embeddings


class Linear(nnx.Module):
    """`[..., in] -> [..., out]`, with the weight stored as on disk, (out, in), and an optional adapter `lora`.

    `axes` are the logical axes of the weight, see `trl_jax.nn`.
    """

    lora: Lora | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, axes: tuple[str, str] = ("", "")):
        self.weight = nnx.Param(jnp.zeros((out_features, in_features), jnp.float32), axes=axes)
        self.bias = nnx.Param(jnp.zeros((out_features,), jnp.float32), axes=axes[:1]) if bias else None
        self.lora = nnx.data(None)

    def __call__(self, x: jax.Array) -> jax.Array:
        # A product of two matrices: with more axes, the gradients take XLA twice as long on a CPU.
        flat = x.reshape(-1, x.shape[-1])
        y = jnp.einsum("ni,oi->no", flat, self.weight[...].astype(x.dtype))
        if self.lora is not None:
            y = self.lora.added(flat, y, self.weight[...])
        if self.bias is not None:
            y += self.bias[...].astype(x.dtype)
        return y.reshape(*x.shape[:-1], -1)

    def folded(self) -> tuple[jax.Array, jax.Array | None]:
        """Matrix (out, in) and bias with the adapter merged, in the dtypes in which they are stored; no dropout."""
        weight, bias = stored(self.weight), None if self.bias is None else self.bias[...]
        return (weight, bias) if self.lora is None else self.lora.folded(weight, bias)


class ClippedLinear(Linear):
    """A linear map whose inputs and outputs are clipped to limits from the checkpoint, frozen scalars."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, axes: tuple[str, str] = ("", "")):
        super().__init__(in_features, out_features, bias=bias, axes=axes)
        self.input_min, self.input_max, self.output_min, self.output_max = (
            nnx.Param(jnp.full((), limit, jnp.float32), axes=()) for limit in (-jnp.inf, jnp.inf) * 2
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = super().__call__(_clipped(x, self.input_min, self.input_max))
        return _clipped(y, self.output_min, self.output_max)


def _clipped(x: jax.Array, low: nnx.Param, high: nnx.Param) -> jax.Array:
    low, high = (jax.lax.stop_gradient(limit[...]).astype(x.dtype) for limit in (low, high))
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


class Embedding(nnx.Module):
    """Token ids `[...]` to embeddings `[..., D]` in `dtype`, with an optional adapter `lora`.

    The row `padding_idx` gets no gradient, as in torch. `axes` are the logical axes of the table.
    """

    lora: Lora | None

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        padding_idx: int | None = None,
        axes: tuple[str, str] = ("", "embed"),
    ):
        self.weight = nnx.Param(jnp.zeros((num_embeddings, features), jnp.float32), axes=axes)
        self.padding_idx = padding_idx
        self.lora = nnx.data(None)

    def __call__(self, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
        embedded = self.weight.rows(ids) if isinstance(self.weight, EncodedWeight) else rows(self.weight[...], ids)
        if self.padding_idx is not None:
            embedded = jnp.where((ids == self.padding_idx)[..., None], jax.lax.stop_gradient(embedded), embedded)
        if self.lora is not None:
            embedded = embedded + self.lora.looked_up(ids, self.padding_idx)
        return embedded.astype(dtype)


def stored(weight: nnx.Param | EncodedWeight) -> jax.Array:
    """A weight in the dtype in which it is stored; float32 for quantized weights."""
    return weight.whole() if isinstance(weight, EncodedWeight) else weight[...]


def rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows `[..., D]` of a table `[V, D]`. Ids past the end get the last row, e.g. for padding after the last
    position."""
    alone = jax.sharding.get_abstract_mesh().empty
    return _rows_late(table, ids) if alone and platform() == "cpu" else _rows(table, ids)


def _rows(table, ids):
    return jnp.take(table, ids, axis=0, mode="clip")


def _rows_backward(saved, gradient):
    """Scatter-add to zeros that depend on the gradient. XLA on CPUs allocates arrays without dependencies at the start
    of a step, so the table's gradient would occupy memory at the same time as all saved activations. For finite
    gradients, the zeros are exactly +0."""
    table, ids = saved
    zeros = jnp.minimum(jnp.abs(gradient.reshape(-1, gradient.shape[-1])[0]), 0)
    return jnp.broadcast_to(zeros, table.shape).at[jnp.clip(ids, 0, len(table) - 1)].add(gradient), None


_rows_late = jax.custom_vjp(_rows)
_rows_late.defvjp(lambda table, ids: (_rows(table, ids), (table, ids)), _rows_backward)


# LoRA


class Lora(nnx.Module):
    """A low-rank adapter (Hu et al. 2021, arXiv:2106.09685): adds `scale * B A x` to W x, A `[r, in]`, B `[out, r]`.

    With a `magnitude` `[out]` (DoRA, Liu et al. 2024, arXiv:2402.09353), rows of W + scale B A are rescaled to that
    norm. `exists` is False in layers without an adapter, whose output then stays W x. `bias` `[out]` is a bias of B.
    `key` enables dropout of the adapter's input.
    """

    def __init__(self, leaves: dict[str, jax.Array], rate: float = 0.0):
        def param(name: str) -> nnx.Param | None:
            return nnx.Param(leaves[name]) if name in leaves else None

        self.a, self.b, self.scale = param("a"), param("b"), param("scale")
        self.bias, self.magnitude, self.exists, self.key = map(param, ("bias", "magnitude", "exists", "key"))
        self.rate = rate

    def added(self, x: jax.Array, y: jax.Array, weight: jax.Array) -> jax.Array:
        """Add the adapter's output for `x` `[n, in]` to `y` = W x `[n, out]`; `weight` is W."""
        dropped = self._dropped(x)
        a, b = (part[...].astype(x.dtype) for part in (self.a, self.b))
        delta = jnp.einsum("nr,or->no", jnp.einsum("ni,ri->nr", dropped, a), b)
        if self.bias is not None:
            delta += self.bias[...].astype(x.dtype)
        delta *= self.scale[...].astype(x.dtype)
        if self.magnitude is None:
            return y + delta
        length = (self.magnitude[...] / jax.lax.stop_gradient(self._row_norms(weight))).astype(x.dtype)
        base = y if self.key is None else jnp.einsum("ni,oi->no", dropped, weight.astype(x.dtype))
        return y + jnp.where(self.exists[...], (length - 1) * base + length * delta, 0)

    def factors(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`[n, r]` and `[out, r]`, whose product is what an adapter without a magnitude adds to W x."""
        inner = jnp.einsum("ni,ri->nr", self._dropped(x), self.a[...].astype(x.dtype))
        return inner, (self.scale[...] * self.b[...]).astype(x.dtype)

    def joined(self, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Widened x `[n, in + more]` and W `[out, in + more]`, whose product includes an adapter with a magnitude."""
        inner, _ = self.factors(x)
        length = self.magnitude[...] / jax.lax.stop_gradient(self._row_norms(weight))
        parts = [weight, ((length - 1)[:, None] * weight), (length * self.scale[...])[:, None] * self.b[...]]
        return jnp.hstack([x, self._dropped(x), inner]), jnp.hstack([part.astype(x.dtype) for part in parts])

    def with_bias(self, bias: jax.Array | None) -> jax.Array | None:
        """The bias of the map plus the adapter's."""
        if self.bias is None:
            return bias
        scaled = self.scale[...] * self.bias[...]
        return scaled if bias is None else bias + scaled

    def folded(self, weight: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Merge the adapter into W and its bias, without dropout."""
        moved, more = weight + self.scale[...] * self.b[...] @ self.a[...], None
        if self.bias is not None:
            more = self.scale[...] * self.bias[...]
        if self.magnitude is not None:
            length = self.magnitude[...] / self._row_norms(weight)
            moved = jnp.where(self.exists[...], length[:, None] * moved, weight)
            more = None if more is None else jnp.where(self.exists[...], length * more, 0)
        return moved, bias if more is None else more if bias is None else bias + more

    def _dropped(self, x: jax.Array) -> jax.Array:
        return x if self.key is None else Dropout(self.rate, self.key[...])(x)

    def _row_norms(self, weight: jax.Array) -> jax.Array:
        moved = weight.astype(jnp.float32) + self.scale[...] * self.b[...] @ self.a[...]
        return jnp.linalg.norm(moved, axis=1)

    def looked_up(self, ids: jax.Array, padding_idx: int | None) -> jax.Array:
        """The addition to rows `ids` of a table; A is `[r, rows]`. The padding row gets no gradient."""
        rows = jnp.take(self.a[...].T, ids, axis=0, mode="clip")
        if padding_idx is not None:
            rows = jnp.where((ids == padding_idx)[..., None], jax.lax.stop_gradient(rows), rows)
        return self.scale[...] * jnp.einsum("...r,or->...o", rows, self.b[...])


class ExpertsLora(nnx.Module):
    """LoRA of expert matrices: A `[E, r, in]`, B `[E, out, r]` (already scaled)."""

    def __init__(self, leaves: dict[str, jax.Array]):
        self.a, self.b = nnx.Param(leaves["a"]), nnx.Param(leaves["b"])


def adapted_dot(x: jax.Array, sizes: jax.Array, weight: jax.Array, *lora: jax.Array) -> jax.Array:
    """Grouped product of rows `[M, in]`, sorted by expert with `sizes` rows per expert, with W (+ B A if given): `[M,
    out]`."""
    y = grouped_dot(x, weight.astype(x.dtype), sizes)
    if not lora:
        return y
    a, b = (part.astype(x.dtype) for part in lora)
    return y + grouped_dot(grouped_dot(x, a, sizes), b, sizes)


# Dropout


class Stream(IntEnum):
    """The uses of a training step's PRNG key. Each folds its number into the key before it splits the key or folds in
    anything else: `split(key, n)[i]` equals `fold_in(key, i)`, so two uses of one key would draw the same numbers."""

    LAYERS, EMBEDDING, CONVOLUTION, ADAPTERS, BEFORE_HEAD, AFTER_HEAD, ROUTERS, NOISE = range(8)


def stream_keys(key: jax.Array | None, stream: Stream, count: int) -> jax.Array | None:
    """`count` keys of a stream; None without a key."""
    return None if key is None else jax.random.split(jax.random.fold_in(key, stream), count)


class Dropout(NamedTuple):
    """Dropout (Srivastava et al. 2014) of a fraction `rate` of the entries."""

    rate: float
    key: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.rate == 1:
            return jnp.zeros_like(x)
        mask = jax.random.bernoulli(self.key, 1 - self.rate, x.shape)
        return jnp.where(mask, x / (1 - self.rate), 0)

    def fold(self, number: int) -> Dropout:
        """The same rate with a derived key."""
        return self._replace(key=jax.random.fold_in(self.key, number))


def dropout_or_none(rate: float, key: jax.Array | None, number: int) -> Dropout | None:
    """Dropout for site `number` among the sites that share a key; None if it is off or the rate is 0."""
    return None if key is None or rate == 0.0 else Dropout(rate, key).fold(number)


# Grouped matrix products

BLOCK = 64  # rows per block on a CPU; each group is padded to a multiple


def grouped_dot(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply each group of rows with its own matrix: x `[M, in]`, weight `[E, out, in]`, `sizes` rows per group,
    result `[M, out]`.

    Accelerators have a kernel for this. On CPUs, XLA would multiply every row with every matrix, so blocks of rows,
    each from one group, are processed sequentially.
    """
    return (_blockwise if platform() == "cpu" else _ragged)(x, weight, sizes)


def _ragged(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, weight.swapaxes(1, 2), sizes)


@jax.custom_vjp
def _blockwise(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    return _products(x, weight, sizes)


def _products(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    group, rows, used, place = _blocks(len(x), sizes)

    def product(block):
        return jax.lax.cond(
            block[2],
            lambda: x.at[block[1]].get(mode="fill", fill_value=0) @ weight[block[0]].T,
            lambda: jnp.zeros((BLOCK, weight.shape[1]), x.dtype),
        )

    return jax.lax.map(product, (group, rows, used)).reshape(-1, weight.shape[1])[place]


def _blocks(count: int, sizes: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """For each block: its group, its rows `[BLOCK]` (`count` for padding), and whether it has any. For each row: its
    position in the concatenated blocks."""
    blocks_of = -(-sizes // BLOCK)
    last_block, last_row = jnp.cumsum(blocks_of), jnp.cumsum(sizes)
    block = jnp.arange(count // BLOCK + len(sizes))
    group = jnp.minimum(jnp.searchsorted(last_block, block, side="right"), len(sizes) - 1)
    first_block, first_row = last_block - blocks_of, last_row - sizes
    rows = (first_row[group] + (block - first_block[group]) * BLOCK)[:, None] + jnp.arange(BLOCK)
    used = block < last_block[-1]
    rows = jnp.where((rows < last_row[group][:, None]) & used[:, None], rows, count)
    of_row = jnp.searchsorted(last_row, jnp.arange(count), side="right")
    return group, rows, used, first_block[of_row] * BLOCK + jnp.arange(count) - first_row[of_row]


def _blockwise_forward(x, weight, sizes):
    return _products(x, weight, sizes), (x, weight, sizes)


def _blockwise_backward(saved, gradient):
    x, weight, sizes = saved
    group, rows, used, _ = _blocks(len(x), sizes)

    def add(total, block):
        here, at, any_row = block
        x_block, g_block = (y.at[at].get(mode="fill", fill_value=0) for y in (x, gradient))
        product = partial(jnp.matmul, g_block.T, x_block, preferred_element_type=jnp.float32)
        return jax.lax.cond(any_row, lambda t: t.at[here].add(product()), lambda t: t, total), None

    d_weight, _ = jax.lax.scan(add, jnp.zeros(weight.shape, jnp.float32), (group, rows, used))
    return _products(gradient, weight.swapaxes(1, 2), sizes), d_weight.astype(weight.dtype), None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


# Frozen weights in fewer bits, converted to floats when they are used, one layer at a time

HALVES = ("bfloat16", "float16")
QUANTIZED_BLOCK, SCALES = 64, 256  # numbers per scale, and scales per scale of scales

# Values of 4-bit codes: quantiles of a normal distribution (NF4), or floats with two exponent bits (FP4).
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 0.5, 2 / 12, 0.25)
TABLES = {"nf4": np.asarray(_NF4, np.float32), "fp4": np.asarray([*_FP4, *(-x for x in _FP4)], np.float32)}


def _dynamic_codes() -> np.ndarray:
    """Values of the 8-bit codes for nested scales: seven decades, each with twice as many steps as the one below
    (dynamic tree quantization, arXiv:1511.04561)."""
    steps = [np.linspace(0.1, 1, 2**decade + 1, dtype=np.float32) for decade in range(7)]
    middles = [10.0 ** (decade - 6) * (s[:-1] + s[1:]) / 2 for decade, s in enumerate(steps)]
    positive = np.concatenate(middles).astype(np.float32)
    return np.sort(np.concatenate([positive, -positive, np.asarray([0.0, 1.0], np.float32)]))


DYNAMIC = _dynamic_codes()


@dataclass(frozen=True)
class Format:
    """The storage format of a matrix (out, in): kind "nf4", "fp4", "int8" or one of HALVES. `nested`: the scales of a
    4-bit matrix are quantized, too."""

    kind: str
    shape: tuple[int, int]
    nested: bool = False

    def leaves(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Name -> shape and dtype of the arrays that store a matrix."""
        rows, columns = self.shape
        if self.kind in HALVES:
            return {"codes": (self.shape, np.dtype("uint16"))}
        if self.kind == "int8":
            return {"codes": ((rows, columns), np.dtype("int8")), "scales": ((rows,), np.dtype("float32"))}
        count = rows * columns
        blocks = -(-count // QUANTIZED_BLOCK)
        leaves = {"codes": ((-(-count // 2),), np.dtype("uint8"))}
        leaves["scales"] = ((blocks,), np.dtype("uint8" if self.nested else "float32"))
        if self.nested:
            leaves["scale_scales"] = ((-(-blocks // SCALES),), np.dtype("float32"))
            leaves["offset"] = ((), np.dtype("float32"))
        return leaves


class EncodedWeight(nnx.Module):
    """A matrix in place of an `nnx.Param` that is stored as codes: numbers of 4 or 8 bits with scales, or the bits of
    16-bit floats. `weight[...]` is the float32 matrix."""

    def __init__(self, form: Format, lead: tuple[int, ...] = (), axes: tuple[str, ...] = ("", "")):
        """`lead` are the sizes of leading axes before the matrix, `axes` the logical axes of all."""

        def param(name: str) -> nnx.Param | None:
            if name not in form.leaves():
                return None
            shape, dtype = form.leaves()[name]
            whole = name == "codes" and len(shape) == 2
            inner = axes[len(lead) :] if whole else ("flat" if name in ("codes", "scales") else "",) * len(shape)
            return nnx.Param(jnp.zeros((*lead, *shape), dtype), axes=(*axes[: len(lead)], *inner))

        self.codes, self.scales = param("codes"), param("scales")
        self.scale_scales, self.offset = param("scale_scales"), param("offset")
        self.form = form

    def __getitem__(self, key: object) -> jax.Array:
        names = self.form.leaves()
        return dequantized(self.form, {name: vars(self)[name][...] for name in names})[key]

    def whole(self) -> jax.Array:
        """The matrix; a 16-bit one keeps its dtype."""
        if self.form.kind not in HALVES:
            return self[...]
        return jax.lax.bitcast_convert_type(self.codes[...], jnp.dtype(self.form.kind))

    def rows(self, ids: jax.Array) -> jax.Array:
        """Rows of a 16-bit table, in float32."""
        return dequantized(self.form, {"codes": jnp.take(self.codes[...], ids, axis=0, mode="clip")})


def dequantized(form: Format, leaves: dict[str, jax.Array]) -> jax.Array:
    """Dequantize a matrix (out, in) to float32."""
    codes = leaves["codes"]
    if form.kind in HALVES:
        return jax.lax.bitcast_convert_type(codes, jnp.dtype(form.kind)).astype(jnp.float32)
    scales = leaves["scales"]
    if form.kind == "int8":
        return codes.astype(jnp.float32) * (scales / 127)[:, None]
    if form.nested:
        per_group = jnp.repeat(leaves["scale_scales"], SCALES)[: scales.shape[0]]
        scales = jnp.asarray(DYNAMIC)[scales] * per_group + leaves["offset"]
    rows, columns = form.shape
    halves = jnp.stack([codes >> 4, codes & 15], axis=-1).reshape(-1)[: rows * columns]
    values = jnp.asarray(TABLES[form.kind])[halves]
    padded = jnp.pad(values, (0, -values.size % QUANTIZED_BLOCK)).reshape(-1, QUANTIZED_BLOCK) * scales[:, None]
    return padded.reshape(-1)[: rows * columns].reshape(form.shape)
