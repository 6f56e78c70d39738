"""Feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.dropout import Dropout
from trl_jax.nn.linear import Linear
from trl_jax.nn.xielu import XIELU


@jax.custom_jvp
def tanh(x: jax.Array) -> jax.Array:
    """tanh(x), beyond |x| = 2 the nearest number to it, as torch's is; XLA's may be four numbers off.

    A unit near 1 has the gradient (1 - t)(1 + t), and a number off is a large part of it. Where the texts of an example
    cancel in a weight's sum, that part is all there is of it, and Adam divides it by its own size.
    """
    size = jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    far = 1 - 2 / (jnp.exp(2 * size) + 1)
    return (jnp.where(size < 0.55, jnp.tanh(size), far) * jnp.sign(x)).astype(x.dtype)


tanh.defjvps(lambda change, t, x: change * (1 - t) * (1 + t))


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
    "tanh": tanh,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def _gelu_tanh_to_the_end(x: jax.Array) -> jax.Array:
    return 0.5 * x * (1 + tanh((2 / jnp.pi) ** 0.5 * (x + 0.044715 * x**3)))


# For gates whose gradient is one token's alone: where torch's is 0, no sum hides a number off. They cost more.
EXACT_ACTIVATIONS = ACTIVATIONS | dict.fromkeys(
    (name for name, function in ACTIVATIONS.items() if function is _gelu_tanh), _gelu_tanh_to_the_end
)
XIELU_NAME = "xielu"  # of the one that has parameters


@dataclass(frozen=True)
class ClampedSwiGLU:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, with gate at most `limit` and up within `limit` of 0 (OpenAI 2025,
    arXiv:2508.10925)."""

    alpha: float
    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


class MLP(nnx.Module):
    """`down(activation(up(x)))`, or gated: `down(activation(gate(x)) * up(x))` (Shazeer 2020, arXiv:2002.05202).
    `scales` multiply what gate gives, and what down gives."""

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        activation: str,
        gated: bool = True,
        bias: bool = False,
        scales: tuple[float, float] = (1.0, 1.0),
    ):
        self.gate = Linear(features, hidden, bias=bias, axes=("mlp", "embed")) if gated else None
        self.up = Linear(features, hidden, bias=bias, axes=("mlp", "embed"))
        self.down = Linear(hidden, features, bias=bias, axes=("embed", "mlp"))
        self.activation, self.scales = XIELU() if activation == XIELU_NAME else ACTIVATIONS[activation], scales

    def __call__(self, x: jax.Array, *, dropout: Dropout | None = None) -> jax.Array:
        """`[..., D]` to the same; `dropout` is applied before the way down."""
        of_gate, of_down = self.scales
        if self.gate is None:
            hidden = self.activation(self.up(x))
        else:
            gate = self.gate(x)
            hidden = self.activation(gate if of_gate == 1.0 else gate * of_gate) * self.up(x)
        out = self.down(hidden if dropout is None else dropout(hidden))
        return out if of_down == 1.0 else out * of_down
