"""The gated delta net (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464), in place of attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.cache.states import RecurrentState
from trl_jax.nn.delta_rule import delta_rule, delta_step
from trl_jax.nn.linear import Linear
from trl_jax.nn.norm import Norm
from trl_jax.nn.short_convolution import silu_convolved

_LEAST_SQUARE = 1e-6  # is added to the squared length of a query or key


class GatedDeltaNet(nnx.Module):
    """Convolved queries, keys and values through the gated delta rule, and its outputs normed and gated.

    `facts` is a models.arch.GatedDelta. The weights of the convolutions lie as on disk, (channels, 1, width), that of
    the token itself last. The logarithm of a token's decay is
    `-exp(A_log) * softplus(decay(x) + dt_bias)`, its strength `sigmoid(beta(x))`.
    """

    def __init__(self, features: int, facts, *, eps: float):
        keys, values = facts.key_heads * facts.key_dim, facts.value_heads * facts.value_dim
        for name, size in (("q", keys), ("k", keys), ("v", values)):
            axis = "heads" if name == "v" else "kv"
            setattr(self, name, Linear(features, size, axes=(axis, "embed")))
            convolution = jnp.zeros((size, 1, facts.width), jnp.float32)
            setattr(self, f"{name}_convolution", nnx.Param(convolution, axes=(axis, "", "")))
        self.gate = Linear(features, values, axes=("heads", "embed"))
        self.beta = Linear(features, facts.value_heads, axes=("heads", "embed"))
        self.decay = Linear(features, facts.value_heads, axes=("heads", "embed"))
        self.dt_bias = nnx.Param(jnp.zeros(facts.value_heads, jnp.float32), axes=("heads",))
        self.A_log = nnx.Param(jnp.zeros(facts.value_heads, jnp.float32), axes=("heads",))
        self.out_norm = Norm(facts.value_dim, kind="rms", eps=eps)
        self.o = Linear(values, features, axes=("embed", "heads"))
        self.facts = facts

    def __call__(
        self, x_RTD: jax.Array, inputs: AttentionInputs, dropout: None = None
    ) -> tuple[jax.Array, RecurrentState]:
        """`[R, T, D]` to the same, and what the tokens that follow need; of `inputs` it takes valid, order, lengths and
        cache."""
        del dropout  # no family has any here
        if inputs.striped is not None:
            raise ValueError("A gated delta net has the whole of a text on one device: leave sequence at 1.")
        if inputs.valid is not None:
            x_RTD = x_RTD * inputs.valid[..., None].astype(x_RTD.dtype)
        order = inputs.order
        x_RTD = x_RTD if order is None else order.ordered(x_RTD)
        q, k, v, window = self._convolved(x_RTD, inputs)
        g, beta = self._gates(x_RTD, inputs.lengths)
        if inputs.cache is None:
            out, state = delta_rule(q, k, v, g, beta, order)
        else:
            before = inputs.cache.state.reshape(len(x_RTD), *inputs.cache.state.shape[-4:])
            out, state = delta_step(*(y[:, 0] for y in (q, k, v, g, beta)), before)
        gate = self.gate(x_RTD).astype(jnp.float32)
        out = self.out_norm(out.astype(x_RTD.dtype).reshape(*gate.shape[:2], -1, self.facts.value_dim))
        out = self.o((out.reshape(gate.shape) * jax.nn.silu(gate)).astype(x_RTD.dtype))
        return out if order is None else order.restored(out), RecurrentState(window, state)

    def _convolved(self, x_RTD: jax.Array, inputs: AttentionInputs) -> tuple[jax.Array, ...]:
        """Queries and keys `[R, T, K, C]` and values `[R, T, K, G, V]`, float32, and the window of the convolution."""
        facts = self.facts
        projected = jnp.concatenate([self.q(x_RTD), self.k(x_RTD), self.v(x_RTD)], axis=-1)
        weight = jnp.concatenate([self.q_convolution[...], self.k_convolution[...], self.v_convolution[...]])[:, 0]
        convolved, window = silu_convolved(projected, weight, None, inputs)
        keys, shape = facts.key_heads * facts.key_dim, convolved.shape[:2]
        q, k = (
            _unit(part.reshape(*shape, facts.key_heads, facts.key_dim))
            for part in (convolved[..., :keys], convolved[..., keys : 2 * keys])
        )
        v = convolved[..., 2 * keys :].reshape(*shape, facts.key_heads, -1, facts.value_dim)
        return q * facts.key_dim**-0.5, k, v, window

    def _gates(self, x_RTD: jax.Array, lengths: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Logarithms of decays and strengths, float32 `[R, T, K, G]`; behind a text's end a state stays as it is."""
        shape = (*x_RTD.shape[:2], self.facts.key_heads, -1)
        decay = jax.nn.softplus(self.decay(x_RTD).astype(jnp.float32) + self.dt_bias[...])
        g = (-jnp.exp(self.A_log[...]) * decay).reshape(shape)
        beta = jax.nn.sigmoid(self.beta(x_RTD)).astype(jnp.float32).reshape(shape)
        if lengths is None:
            return g, beta
        inside = (jnp.arange(x_RTD.shape[1]) < lengths[:, None])[..., None, None]
        return jnp.where(inside, g, 0), jnp.where(inside, beta, 0)


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _LEAST_SQUARE)
