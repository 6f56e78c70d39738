"""Trainable vectors of virtual tokens.

The vectors are trained directly (prompt tuning, Lester et al. 2021, arXiv:2104.08691) or computed by a small network
(P-tuning, Liu et al. 2021, arXiv:2103.10385). They serve as embeddings, or as keys and values (prefix tuning, Li and
Liang 2021, arXiv:2101.00190). Arrays have PEFT's names and shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.linear import dropout_or_none

Arrays = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
EMBEDDING = "embedding.weight"


class VectorMaker(Protocol):
    """Computes the vectors `[n, width]` of `count` virtual tokens from trainable arrays."""

    count: int
    width: int

    @property
    def shapes(self) -> Shapes:
        """Name -> shape of each array, in the order of the torch module."""

    def __call__(self, arrays: Arrays, key: jax.Array | None = None) -> jax.Array:
        """The vectors; `key` enables dropout."""


@dataclass(frozen=True)
class Table:
    """A table of vectors that are trained directly."""

    count: int
    width: int

    @property
    def shapes(self) -> Shapes:
        return {EMBEDDING: (self.count, self.width)}

    def __call__(self, arrays: Arrays, key: jax.Array | None = None) -> jax.Array:
        del key
        return arrays[EMBEDDING]


@dataclass(frozen=True)
class Mlp:
    """A table of vectors with `inner` channels, followed by linear maps to `sizes` with an `activation` in between;
    `name` is the name of the torch Sequential."""

    count: int
    inner: int
    sizes: tuple[int, ...]
    name: str
    activation: str = "relu"

    @property
    def width(self) -> int:
        return self.sizes[-1]

    @property
    def shapes(self) -> Shapes:
        return {EMBEDDING: (self.count, self.inner)} | _maps(self.name, self.inner, self.sizes)

    def __call__(self, arrays: Arrays, key: jax.Array | None = None) -> jax.Array:
        del key
        return _mapped(arrays[EMBEDDING], arrays, self.name, len(self.sizes), self.activation)


@dataclass(frozen=True)
class Lstm:
    """A table of vectors, a bidirectional LSTM of `layers` layers, and two linear maps.

    hidden: channels per direction. rate: dropout between layers.
    """

    count: int
    width: int
    hidden: int
    layers: int
    rate: float = 0.0

    @property
    def shapes(self) -> Shapes:
        shapes, gates = {EMBEDDING: (self.count, self.width)}, 4 * self.hidden
        for layer in range(self.layers):
            inputs = 2 * self.hidden if layer else self.width
            for end in (f"l{layer}", f"l{layer}_reverse"):
                shapes |= {f"lstm_head.weight_ih_{end}": (gates, inputs)}
                shapes |= {f"lstm_head.weight_hh_{end}": (gates, self.hidden)}
                shapes |= {f"lstm_head.bias_{kind}_{end}": (gates,) for kind in ("ih", "hh")}
        return shapes | _maps("mlp_head", 2 * self.hidden, (2 * self.hidden, self.width))

    def __call__(self, arrays: Arrays, key: jax.Array | None = None) -> jax.Array:
        x = arrays[EMBEDDING]
        for layer in range(self.layers):
            dropout = dropout_or_none(self.rate, key, layer) if layer else None
            x = x if dropout is None else dropout(x)
            x = jnp.hstack([self._direction(x, arrays, layer, reverse=reverse) for reverse in (False, True)])
        return _mapped(x, arrays, "mlp_head", 2, "relu")

    def _direction(self, x: jax.Array, arrays: Arrays, layer: int, *, reverse: bool) -> jax.Array:
        """Run one direction of a layer: states `[n, hidden]`."""
        end = f"l{layer}_reverse" if reverse else f"l{layer}"
        inner, outer = arrays[f"lstm_head.weight_hh_{end}"], arrays[f"lstm_head.weight_ih_{end}"]
        bias = arrays[f"lstm_head.bias_ih_{end}"] + arrays[f"lstm_head.bias_hh_{end}"]

        def step(state: tuple[jax.Array, jax.Array], gates: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            hidden, cell = state
            enter, forget, new, out = jnp.split(gates + inner @ hidden, 4)
            cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jnp.tanh(new)
            hidden = jax.nn.sigmoid(out) * jnp.tanh(cell)
            return (hidden, cell), hidden

        begin = jnp.zeros(self.hidden, x.dtype)
        return jax.lax.scan(step, (begin, begin), x @ outer.T + bias, reverse=reverse)[1]


def _maps(name: str, inputs: int, sizes: tuple[int, ...]) -> Shapes:
    """Shapes of the linear maps of a torch Sequential in which linear maps and activations alternate."""
    shapes, before = {}, inputs
    for number, size in enumerate(sizes):
        shapes |= {f"{name}.{2 * number}.weight": (size, before), f"{name}.{2 * number}.bias": (size,)}
        before = size
    return shapes


_ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh}


def _mapped(x: jax.Array, arrays: Arrays, name: str, count: int, activation: str) -> jax.Array:
    for number in range(0, 2 * count, 2):
        x = x if number == 0 else _ACTIVATIONS[activation](x)
        x = x @ arrays[f"{name}.{number}.weight"].T + arrays[f"{name}.{number}.bias"]
    return x


class VirtualRows(nnx.Module):
    """Embeddings `[n, D]` of the ids from `first` on, which follow the ids of the token table."""

    def __init__(self, rows: jax.Array, first: int):
        self.rows, self.first = nnx.Param(rows), first

    def __call__(self, embedded: jax.Array, ids: jax.Array) -> jax.Array:
        """Replace the embeddings `[..., D]` of virtual tokens among `ids` `[...]`."""
        number = ids - self.first
        rows = jnp.take(self.rows[...], number, axis=0, mode="clip").astype(embedded.dtype)
        return jnp.where((number >= 0)[..., None], rows, embedded)


class Prefix(nnx.Module):
    """Keys and values of virtual tokens for one layer, `[n, K, C]` each."""

    def __init__(self, keys: jax.Array, values: jax.Array):
        self.keys, self.values = nnx.Param(keys), nnx.Param(values)

    def __call__(self, k_RTKC: jax.Array, v_RTKC: jax.Array, number_RT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Replace the keys and values of virtual tokens. `number_RT` is the index of each virtual token, negative for
        other tokens."""
        virtual = (number_RT >= 0)[..., None, None]
        prefix = (jnp.take(part[...], number_RT, axis=0, mode="clip") for part in (self.keys, self.values))
        k, v = (
            jnp.where(virtual, new.astype(old.dtype), old) for new, old in zip(prefix, (k_RTKC, v_RTKC), strict=True)
        )
        return k, v
