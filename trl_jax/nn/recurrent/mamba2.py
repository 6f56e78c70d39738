"""The mixer of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), in place of attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.linear import Linear
from trl_jax.nn.norm import Norm
from trl_jax.nn.recurrent.layer import Recurrent, inside
from trl_jax.nn.recurrent.ssd import state_space, state_space_step

_PROJECTED = ("gate", "x", "B", "C", "dt")  # the parts of the first map, in the order of `StateSpace.scales`


class Mamba2(Recurrent):
    """Convolved inputs, and what is written with and read by, through the state space; its outputs gated and normed.

    `facts` is a models.arch.StateSpace. A token's step of time is `softplus(dt(x) + dt_bias)` within
    `facts.dt_limits`, the logarithm of its decay `-exp(A_log)` times that.
    """

    _hides_convolved = True
    _scan, _step = staticmethod(state_space), staticmethod(state_space_step)

    def __init__(self, features: int, facts, *, eps: float):
        inner, states = facts.heads * facts.head_dim, facts.groups * facts.state_dim
        parts = {"x": inner, "B": states, "C": states}
        biases = {"bias": facts.bias, "convolution_bias": facts.convolution_bias}
        super().__init__(features, parts, values="x", width=facts.width, **biases)
        self.gate = Linear(features, inner, bias=facts.bias, axes=("heads", "embed"))
        self.dt = Linear(features, facts.heads, bias=facts.bias, axes=("heads", "embed"))
        for name in ("dt_bias", "A_log", "D"):
            setattr(self, name, nnx.Param(jnp.zeros(facts.heads, jnp.float32), axes=("heads",)))
        self.out_norm = None if facts.norm is None else Norm(inner, kind="rms", eps=eps, groups=facts.groups)
        self.o = Linear(inner, features, bias=facts.out_bias, axes=("embed", "heads"))
        self.facts = facts

    def _projected(self, name: str, x_RTD: jax.Array) -> jax.Array:
        scale = self.facts.scales[_PROJECTED.index(name)]
        projected = vars(self)[name](x_RTD)
        return projected if scale == 1.0 else projected * scale

    def _given(self, x_RTD: jax.Array, parts: list[jax.Array], lengths: jax.Array | None) -> tuple[jax.Array, ...]:
        facts, (x, B, C) = self.facts, parts
        B, C = (y.reshape(*y.shape[:2], facts.groups, facts.state_dim) for y in (B, C))
        dt = inside(self._steps(x_RTD), lengths)
        x = x.reshape(*dt.shape, facts.head_dim)
        return C, B, x * dt[..., None], -jnp.exp(self.A_log[...]).reshape(dt.shape[2:]) * dt

    def _closed(self, out: jax.Array, x_RTD: jax.Array, parts: list[jax.Array]) -> jax.Array:
        out = out + jnp.repeat(self.D[...], self.facts.head_dim) * parts[0]
        gate = jax.nn.silu(self._projected("gate", x_RTD).astype(jnp.float32))
        return self.o(self._gated(out, gate).astype(x_RTD.dtype))

    def _steps(self, x_RTD: jax.Array) -> jax.Array:
        """Steps of time, float32 `[R, T, K, G]`."""
        dt = jax.nn.softplus(self._projected("dt", x_RTD).astype(jnp.float32) + self.dt_bias[...])
        return jnp.clip(dt, *self.facts.dt_limits).reshape(*x_RTD.shape[:2], self.facts.groups, -1)

    def _gated(self, out: jax.Array, gate: jax.Array) -> jax.Array:
        if self.facts.norm == "before_gate":
            return self.out_norm(out) * gate
        return out * gate if self.out_norm is None else self.out_norm(out * gate)
