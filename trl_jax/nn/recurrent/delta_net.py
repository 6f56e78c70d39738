"""The gated delta net (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464), in place of attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.linear import Linear
from trl_jax.nn.norm import Norm
from trl_jax.nn.recurrent.delta_rule import delta_rule, delta_step
from trl_jax.nn.recurrent.layer import Recurrent, inside

_LEAST_SQUARE = 1e-6  # is added to the squared length of a query or key


class GatedDeltaNet(Recurrent):
    """Convolved queries, keys and values through the gated delta rule, and its outputs normed and gated.

    `facts` is a models.arch.GatedDelta. The logarithm of a token's decay is `-exp(A_log) * softplus(decay(x) +
    dt_bias)`, its strength `sigmoid(beta(x))`.
    """

    _hides_convolved = False
    _scan, _step = staticmethod(delta_rule), staticmethod(delta_step)

    def __init__(self, features: int, facts, *, eps: float):
        keys, values = facts.key_heads * facts.key_dim, facts.value_heads * facts.value_dim
        super().__init__(features, {"q": keys, "k": keys, "v": values}, values="v", width=facts.width)
        self.gate = Linear(features, values, axes=("heads", "embed"))
        self.beta = Linear(features, facts.value_heads, axes=("heads", "embed"))
        self.decay = Linear(features, facts.value_heads, axes=("heads", "embed"))
        self.dt_bias = nnx.Param(jnp.zeros(facts.value_heads, jnp.float32), axes=("heads",))
        self.A_log = nnx.Param(jnp.zeros(facts.value_heads, jnp.float32), axes=("heads",))
        self.out_norm = Norm(facts.value_dim, kind="rms", eps=eps)
        self.o = Linear(values, features, axes=("embed", "heads"))
        self.facts = facts

    def _projected(self, name: str, x_RTD: jax.Array) -> jax.Array:
        return vars(self)[name](x_RTD)

    def _given(self, x_RTD: jax.Array, parts: list[jax.Array], lengths: jax.Array | None) -> tuple[jax.Array, ...]:
        facts, (q, k, v) = self.facts, parts
        q, k = (_unit(y.reshape(*y.shape[:2], facts.key_heads, facts.key_dim)) for y in (q, k))
        v = v.reshape(*v.shape[:2], facts.key_heads, -1, facts.value_dim)
        return q * facts.key_dim**-0.5, k, v, *(inside(y, lengths) for y in self._gates(x_RTD))

    def _closed(self, out: jax.Array, x_RTD: jax.Array, parts: list[jax.Array]) -> jax.Array:
        gate = self.gate(x_RTD).astype(jnp.float32)
        out = self.out_norm(out.astype(x_RTD.dtype).reshape(*out.shape[:2], -1, self.facts.value_dim))
        return self.o((out.reshape(gate.shape) * jax.nn.silu(gate)).astype(x_RTD.dtype))

    def _gates(self, x_RTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logarithms of decays and strengths, float32 `[R, T, K, G]`."""
        shape = (*x_RTD.shape[:2], self.facts.key_heads, -1)
        decay = jax.nn.softplus(self.decay(x_RTD).astype(jnp.float32) + self.dt_bias[...])
        g = (-jnp.exp(self.A_log[...]) * decay).reshape(shape)
        return g, jax.nn.sigmoid(self.beta(x_RTD)).astype(jnp.float32).reshape(shape)


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _LEAST_SQUARE)
