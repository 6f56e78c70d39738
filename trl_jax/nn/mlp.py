"""Feed-forward layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.dropout import Dropout
from trl_jax.nn.linear import Linear


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


class MLP(nnx.Module):
    """`down(activation(up(x)))`, or gated: `down(activation(gate(x)) * up(x))` (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, features: int, hidden: int, *, activation: str, gated: bool = True, bias: bool = False):
        self.gate = Linear(features, hidden, bias=bias) if gated else None
        self.up = Linear(features, hidden, bias=bias)
        self.down = Linear(hidden, features, bias=bias)
        self.activation = ACTIVATIONS[activation]

    def __call__(self, x: jax.Array, *, dropout: Dropout | None = None) -> jax.Array:
        """`[..., D]` to the same; `dropout` is applied before the way down."""
        hidden = self.activation(self.up(x)) if self.gate is None else self.activation(self.gate(x)) * self.up(x)
        return self.down(hidden if dropout is None else dropout(hidden))
