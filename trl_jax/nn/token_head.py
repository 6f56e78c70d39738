"""A language model's head at the places that are read, a chunk of them at a time: there is never an array `[N, V]`.

The backward pass makes a chunk's logits again, from the logarithm of the softmax's sum; under a frozen weight it need
not: the forward pass keeps the derivatives of log-probabilities by hidden states, `[N, D]`. Chunks of which no place
has a target are not computed. Where the weight's rows are divided over an axis of the mesh, all that is done over
the vocabulary are plain reductions, so devices send each other numbers of a place and no logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from trl_jax.core.token_outputs import TokenOutputs
from trl_jax.nn.platform import platform
from trl_jax.nn.token_logits import rounded, tempered

# Numbers of a chunk, and the fewest rows: the weight's gradient is read and written once a chunk, which has to have
# rows enough to outweigh that, and more of them where products are quick. A CPU is faster with numbers that its caches
# hold, and asks the system for less memory.
_LOGITS = {"cpu": 3 << 19, "gpu": 1 << 27, "tpu": 1 << 27}
_FEWEST = {"cpu": 192, "gpu": 256, "tpu": 256}
_MULTIPLE = 64
_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def token_outputs(
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    *,
    bias: jax.Array | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> TokenOutputs:
    """Outputs `[N]` of hidden states `[N, D]` under a weight `[V, D]` and a bias `[V]`, float32.

    Logits are `z = softcap * tanh((hidden @ weight.T + bias) * scale / softcap) / temperature`, and all outputs are of
    their softmax. The product and the bias are of hidden's dtype, what follows is float32. `targets` `[N]` are ids;
    below 0, a place has none, and such places come last: their outputs are zeros. What takes no part in
    differentiation, as a frozen weight, gets no gradient computed.
    """
    places, rows = len(targets), _chunk_rows(len(targets), len(weight))
    filled = -places % rows
    head = _Head(rows, float(scale), None if softcap is None else float(softcap), float(temperature))
    hidden, targets = jnp.pad(hidden, ((0, filled), (0, 0))), jnp.pad(targets, (0, filled), constant_values=-1)
    outputs = TokenOutputs(*(output[:places] for output in _outputs(head, hidden, weight, bias, targets)))
    mean_logits, squares = jax.lax.stop_gradient((outputs.mean_logits, outputs.log_sum_sq_probs))
    return outputs._replace(mean_logits=mean_logits, log_sum_sq_probs=squares)


def _chunk_rows(places: int, vocabulary: int) -> int:
    rows = _LOGITS[platform()] // vocabulary // _MULTIPLE * _MULTIPLE
    return max(1, min(places, max(_FEWEST[platform()], rows)))


def _divided() -> bool:
    """Whether the compiler divides products over the devices of a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)


@dataclass(frozen=True)
class _Head:
    """Rows of a chunk, and what becomes of the product."""

    rows: int
    scale: float
    softcap: float | None
    temperature: float

    def logits(self, hidden: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Float32 `[rows, V]`; `weight` and `bias` are of hidden's dtype."""
        z = rounded(jnp.einsum("nd,vd->nv", hidden, weight), hidden.dtype)
        z = (z if bias is None else rounded(z + bias, hidden.dtype)) * self.scale
        return tempered(z if self.softcap is None else self.softcap * jnp.tanh(z / self.softcap), self.temperature)

    def d_products(self, d_z: jax.Array, z: jax.Array) -> jax.Array:
        """The gradient of the product, of that of the logits."""
        slope = 1.0 if self.softcap is None else 1 - jnp.square(z * self.temperature / self.softcap)
        return d_z * slope * (self.scale / self.temperature)

    def chunks(self, targets: jax.Array) -> jax.Array:
        """How many chunks have a target.

        Written out for shards of the batch, each may have its own number. Where the compiler divides products as well,
        devices send to each other in every chunk, and all do as many as the longest, for which they would wait anyway:
        whether loops of different lengths may send is up to the platform.
        """
        count = (jnp.sum(targets >= 0, dtype=jnp.int32) + self.rows - 1) // self.rows
        axes = jax.sharding.get_abstract_mesh().manual_axes
        return jax.lax.pmax(count, axes) if axes and _divided() else count

    def take(self, chunk: jax.Array, array: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, chunk * self.rows, self.rows)

    def put(self, chunk: jax.Array, array: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(array, rows.astype(array.dtype), chunk * self.rows, 0)


class _Yes(NamedTuple):
    """A pytree without arrays: what is saved may not be a bool."""


class _Saved(NamedTuple):
    """The forward pass's for the backward. `differentiated`: of hidden, weight and bias, those with a gradient."""

    arrays: tuple[jax.Array, jax.Array, jax.Array | None, jax.Array]
    entropy: jax.Array
    log_sum: jax.Array
    chunks: jax.Array
    d_hidden: jax.Array | None
    differentiated: tuple[_Yes | None, ...]


def _forward(head, hidden, weight, bias, targets, with_d_hidden=False):
    """TokenOutputs, the logarithms of the softmax's sums `[N]`, the number of chunks; the derivatives `[N, D]` of
    log-probabilities by hidden states, if they are asked for."""
    weight, bias = jax.tree.map(lambda array: array.astype(hidden.dtype), (weight, bias))
    ids, chunks = jnp.arange(len(weight)), head.chunks(targets)

    def compute(chunk, carried):
        outputs, d_hidden = carried
        target, z = head.take(chunk, targets), head.logits(head.take(chunk, hidden), weight, bias)
        at_target = ids == target[:, None]
        largest = jnp.max(z, axis=1)
        weights = jnp.exp(z - largest[:, None])
        total = jnp.sum(weights, axis=1)
        log_sum = largest + jnp.log(total)
        first = jnp.min(jnp.where(z == largest[:, None], ids, len(ids)), axis=1)
        logps = _picked(z, target, at_target) - log_sum
        entropy = log_sum - jnp.sum(weights * z, axis=1) / total
        mean, squares = jnp.mean(z, axis=1), jnp.log(jnp.sum(jnp.square(weights), axis=1)) - 2 * jnp.log(total)
        found = logps, entropy, mean - log_sum, first == target, mean, squares
        found = (*(jnp.where(target >= 0, output, 0) for output in found), log_sum)
        if d_hidden is not None:
            d_z = head.d_products(at_target - weights / total[:, None], z).astype(hidden.dtype)
            d_hidden = head.put(chunk, d_hidden, _product("nv,vd->nd", d_z, weight))
        return tuple(head.put(chunk, array, rows) for array, rows in zip(outputs, found, strict=True)), d_hidden

    zeros, d_hidden = jnp.zeros(len(targets), jnp.float32), jnp.zeros_like(hidden) if with_d_hidden else None
    (*outputs, log_sum), d_hidden = jax.lax.fori_loop(0, chunks, compute, ((zeros,) * 7, d_hidden))
    return TokenOutputs(*outputs), log_sum, chunks, d_hidden


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _outputs(head, hidden, weight, bias, targets):
    return _forward(head, hidden, weight, bias, targets)[0]


def _outputs_forward(head, *primals):
    arrays = jax.tree.map(lambda primal: primal.value, primals)
    differentiated = tuple(_Yes() if primal is not None and primal.perturbed else None for primal in primals[:3])
    # Of a frozen weight nothing but the hidden states' gradient is wanted: a row is its derivative times a cotangent.
    outputs, *saved = _forward(head, *arrays, with_d_hidden=differentiated == (_Yes(), None, None))
    return outputs, _Saved(arrays, outputs.entropy, *saved, differentiated)


def _outputs_backward(head, saved, cotangents):
    hidden, weight, bias, targets = saved.arrays
    no_others = isinstance(cotangents.entropy, SymbolicZero) and isinstance(cotangents.mean_logps, SymbolicZero)
    if saved.d_hidden is not None and no_others:
        of_logps = _column(targets, cotangents.logps)
        return (saved.d_hidden * of_logps).astype(hidden.dtype), None, None, None
    cast_weight, cast_bias = jax.tree.map(lambda array: array.astype(hidden.dtype), (weight, bias))

    def add(chunk, gradients):
        d_hidden, d_weight, d_bias = gradients
        hidden_rows = head.take(chunk, hidden)
        z = head.logits(hidden_rows, cast_weight, cast_bias)
        d_z = head.d_products(_d_logits(head, chunk, z, saved, cotangents), z).astype(hidden.dtype)
        if d_hidden is not None:
            d_hidden = head.put(chunk, d_hidden, _product("nv,vd->nd", d_z, cast_weight))
        if d_weight is not None:
            d_weight += _product("nv,nd->vd", d_z, hidden_rows)
        if d_bias is not None:
            d_bias += jnp.sum(d_z, axis=0, dtype=jnp.float32)
        return d_hidden, d_weight, d_bias

    kinds = hidden.dtype, jnp.float32, jnp.float32
    zeros = tuple(
        None if asked is None else jnp.zeros(array.shape, kind)
        for asked, array, kind in zip(saved.differentiated, saved.arrays, kinds, strict=False)
    )
    d_hidden, d_weight, d_bias = jax.lax.fori_loop(0, saved.chunks, add, zeros)
    cast = [None if d is None else d.astype(a.dtype) for d, a in ((d_weight, weight), (d_bias, bias))]
    return d_hidden, *cast, None


def _d_logits(head, chunk, z, saved, cotangents):
    """The gradient `[rows, V]` of the chunk's logits, zeros where there is no target."""
    target = head.take(chunk, saved.arrays[3])
    columns = [_column(saved.arrays[3], cotangent) for cotangent in cotangents[:3]]
    of_logps, of_entropy, of_mean = (head.take(chunk, column) for column in columns)
    log_p = z - head.take(chunk, saved.log_sum)[:, None]
    of_p = of_logps + of_mean
    if not isinstance(cotangents.entropy, SymbolicZero):
        of_p = of_p + of_entropy * (log_p + head.take(chunk, saved.entropy)[:, None])
    at_target = jnp.arange(z.shape[1]) == target[:, None]
    return jnp.where(at_target, of_logps, 0) + of_mean / z.shape[1] - jnp.exp(log_p) * of_p


def _picked(z, target, at_target):
    """The logits of the targets, `[rows]`, whatever where there is none."""
    if _divided():
        return jnp.sum(jnp.where(at_target, z, 0), axis=1)
    return jnp.take_along_axis(z, jnp.maximum(target, 0)[:, None], axis=1)[:, 0]


def _column(targets, cotangent):
    """Cotangents `[n, 1]`, without those of places that have no target."""
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros((len(targets), 1), jnp.float32)
    return jnp.where(targets >= 0, cotangent, 0)[:, None]


_outputs.defvjp(_outputs_forward, _outputs_backward, symbolic_zeros=True)
