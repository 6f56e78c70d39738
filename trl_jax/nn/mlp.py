"""Feed-forward layers."""

from __future__ import annotations

import jax
from flax import nnx

from trl_jax.nn.linear import Linear

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class GatedMLP(nnx.Module):
    """`down(activation(gate(x)) * up(x))` (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, arch):
        self.gate = Linear(arch.hidden_size, arch.mlp_size, bias=arch.mlp_bias)
        self.up = Linear(arch.hidden_size, arch.mlp_size, bias=arch.mlp_bias)
        self.down = Linear(arch.mlp_size, arch.hidden_size, bias=arch.mlp_bias)
        self.activation = ACTIVATIONS[arch.activation]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.activation(self.gate(x)) * self.up(x))
