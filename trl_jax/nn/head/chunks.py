"""A language model's head taken a chunk of hidden states at a time, so that there is never an array `[N, V]`.

Common to all that is computed of logits where tokens are read. Where the weight's rows are divided over an axis of the
mesh, all that is done over the vocabulary are plain reductions: devices send each other numbers of a place, no logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from trl_jax.nn.head.logits import rounded, tempered
from trl_jax.nn.platform import platform

# Numbers of a chunk, and the fewest rows: the weight's gradient is read and written once a chunk, which has to have
# rows enough to outweigh that, and more of them where products are quick. A CPU is faster with numbers that its caches
# hold, and asks the system for less memory.
LOGITS = {"cpu": 3 << 19, "gpu": 1 << 27, "tpu": 1 << 27}
FEWEST = {"cpu": 192, "gpu": 256, "tpu": 256}
_MULTIPLE = 64
product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def chunk_rows(places: int, vocabulary: int) -> int:
    """The rows of a chunk, of so many places that are read."""
    rows = LOGITS[platform()] // vocabulary // _MULTIPLE * _MULTIPLE
    return max(1, min(places, max(FEWEST[platform()], rows)))


def divided() -> bool:
    """Whether the compiler divides products over the devices of a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)


@dataclass(frozen=True)
class Head:
    """Rows of a chunk, and what becomes of the product: `softcap * tanh(product * scale / softcap) / temperature`.

    rounds: whether the product has no more bits than the hidden states, as where a layer gives it.
    """

    rows: int
    scale: float
    softcap: float | None
    temperature: float
    rounds: bool = True

    def logits(self, hidden: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Float32 `[rows, V]`; `weight` and `bias` are of hidden's dtype."""
        if self.rounds:
            z = rounded(jnp.einsum("nd,vd->nv", hidden, weight), hidden.dtype)
            z = z if bias is None else rounded(z + bias, hidden.dtype)
        else:
            z = product("nd,vd->nv", hidden, weight)
            z = z if bias is None else z + bias
        z = z * self.scale
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
        return jax.lax.pmax(count, axes) if axes and divided() else count

    def take(self, chunk: jax.Array, array: jax.Array) -> jax.Array:
        """The rows of a chunk."""
        return jax.lax.dynamic_slice_in_dim(array, chunk * self.rows, self.rows)

    def put(self, chunk: jax.Array, array: jax.Array, rows: jax.Array) -> jax.Array:
        """The array with the rows of a chunk in it."""
        return jax.lax.dynamic_update_slice_in_dim(array, rows.astype(array.dtype), chunk * self.rows, 0)


class Yes(NamedTuple):
    """A pytree without arrays: what is saved of a forward pass may not be a bool."""


def differentiated(primals: Sequence) -> tuple[Yes | None, ...]:
    """Of hidden states, weight and bias, as a custom_vjp with symbolic zeros gives them, those with a gradient."""
    return tuple(Yes() if primal is not None and primal.perturbed else None for primal in primals)


def gradients(
    head: Head,
    arrays: tuple[jax.Array, jax.Array, jax.Array | None],
    asked: Sequence[Yes | None],
    chunks: jax.Array,
    d_logits: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array | None, ...]:
    """The gradients of hidden states, weight and bias, of those that are asked for.

    Args:
        d_logits: (chunk, its logits) -> the gradient `[rows, V]` of these; zeros where there is no target.
    """
    hidden, weight, bias = arrays
    cast_weight, cast_bias = jax.tree.map(lambda array: array.astype(hidden.dtype), (weight, bias))

    def add(chunk, found):
        d_hidden, d_weight, d_bias = found
        hidden_rows = head.take(chunk, hidden)
        z = head.logits(hidden_rows, cast_weight, cast_bias)
        d_z = head.d_products(d_logits(chunk, z), z).astype(hidden.dtype)
        if d_hidden is not None:
            d_hidden = head.put(chunk, d_hidden, product("nv,vd->nd", d_z, cast_weight))
        if d_weight is not None:
            d_weight += product("nv,nd->vd", d_z, hidden_rows)
        if d_bias is not None:
            d_bias += jnp.sum(d_z, axis=0, dtype=jnp.float32)
        return d_hidden, d_weight, d_bias

    kinds = hidden.dtype, jnp.float32, jnp.float32
    zeros = tuple(
        None if one is None else jnp.zeros(array.shape, kind)
        for one, array, kind in zip(asked, arrays, kinds, strict=True)
    )
    d_hidden, d_weight, d_bias = jax.lax.fori_loop(0, chunks, add, zeros)
    return d_hidden, *(None if d is None else d.astype(a.dtype) for d, a in ((d_weight, weight), (d_bias, bias)))


def column(targets: jax.Array, cotangent: jax.Array | SymbolicZero) -> jax.Array:
    """Cotangents `[n, 1]`, without those of places that have no target."""
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros((len(targets), 1), jnp.float32)
    return jnp.where(targets >= 0, cotangent, 0)[:, None]
