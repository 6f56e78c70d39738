"""The mixer of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), in place of attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.cache.states import RecurrentState
from trl_jax.nn.linear import Linear
from trl_jax.nn.norm import Norm
from trl_jax.nn.short_convolution import silu_convolved
from trl_jax.nn.ssd import state_space, state_space_step

_PROJECTED = ("gate", "x", "B", "C", "dt")  # the parts of the first map, in the order of `StateSpace.scales`


class Mamba2(nnx.Module):
    """Convolved inputs, and what is written with and read by, through the state space; its outputs gated and normed.

    `facts` is a models.arch.StateSpace. The weights of the convolutions lie as on disk, (channels, 1, width), that of
    the token itself last. A token's step of time is `softplus(dt(x) + dt_bias)` within `facts.dt_limits`, the logarithm
    of its decay `-exp(A_log)` times that.
    """

    def __init__(self, features: int, facts, *, eps: float):
        inner, states = facts.heads * facts.head_dim, facts.groups * facts.state_dim
        for name, size in (("x", inner), ("B", states), ("C", states)):
            axis = "heads" if name == "x" else "kv"
            setattr(self, name, Linear(features, size, bias=facts.bias, axes=(axis, "embed")))
            weight = jnp.zeros((size, 1, facts.width), jnp.float32)
            setattr(self, f"{name}_convolution", nnx.Param(weight, axes=(axis, "", "")))
            bias = nnx.Param(jnp.zeros(size, jnp.float32), axes=(axis,)) if facts.convolution_bias else None
            setattr(self, f"{name}_convolution_bias", bias)
        self.gate = Linear(features, inner, bias=facts.bias, axes=("heads", "embed"))
        self.dt = Linear(features, facts.heads, bias=facts.bias, axes=("heads", "embed"))
        for name in ("dt_bias", "A_log", "D"):
            setattr(self, name, nnx.Param(jnp.zeros(facts.heads, jnp.float32), axes=("heads",)))
        self.out_norm = None if facts.norm is None else Norm(inner, kind="rms", eps=eps, groups=facts.groups)
        self.o = Linear(inner, features, bias=facts.out_bias, axes=("embed", "heads"))
        self.facts = facts

    def __call__(
        self, x_RTD: jax.Array, inputs: AttentionInputs, dropout: None = None
    ) -> tuple[jax.Array, RecurrentState]:
        """`[R, T, D]` to the same, and what the tokens that follow need; of `inputs` it takes valid, order, lengths and
        cache."""
        del dropout  # no family has any here
        if inputs.striped is not None:
            raise ValueError("A layer of Mamba has the whole of a text on one device: leave sequence at 1.")
        x_RTD = _visible(x_RTD, inputs.valid)
        order = inputs.order
        x_RTD = x_RTD if order is None else order.ordered(x_RTD)
        x, B, C, window = self._convolved(x_RTD, inputs)
        dt = self._steps(x_RTD, inputs.lengths)
        g = -jnp.exp(self.A_log[...]).reshape(dt.shape[2:]) * dt
        if inputs.cache is None:
            out, state = state_space(C, B, x * dt[..., None], g, order)
        else:
            before = inputs.cache.state.reshape(len(x_RTD), *inputs.cache.state.shape[-4:])
            out, state = state_space_step(*(y[:, 0] for y in (C, B, x * dt[..., None], g)), before)
        out = out.reshape(x.shape) + self.D[...].reshape(dt.shape[2:])[..., None] * x
        out = self.o(self._gated(out.reshape(*x.shape[:2], -1), x_RTD).astype(x_RTD.dtype))
        return out if order is None else order.restored(out), RecurrentState(window, state)

    def _convolved(self, x_RTD: jax.Array, inputs: AttentionInputs) -> tuple[jax.Array, ...]:
        """Inputs `[R, T, K, G, V]`, B and C `[R, T, K, C]`, float32, and the window of the convolution."""
        facts, names = self.facts, ("x", "B", "C")
        projected = jnp.concatenate([self._projected(name, x_RTD) for name in names], axis=-1)
        weight = jnp.concatenate([vars(self)[f"{name}_convolution"][...] for name in names])[:, 0]
        bias = None
        if facts.convolution_bias:
            bias = jnp.concatenate([vars(self)[f"{name}_convolution_bias"][...] for name in names])
        convolved, window = silu_convolved(projected, weight, bias, inputs)
        convolved, shape = _visible(convolved, inputs.valid), convolved.shape[:2]
        inner, states = facts.heads * facts.head_dim, facts.groups * facts.state_dim
        x, B, C = jnp.split(convolved, [inner, inner + states], axis=-1)
        B, C = (y.reshape(*shape, facts.groups, facts.state_dim) for y in (B, C))
        return x.reshape(*shape, facts.groups, -1, facts.head_dim), B, C, window

    def _steps(self, x_RTD: jax.Array, lengths: jax.Array | None) -> jax.Array:
        """Steps of time, float32 `[R, T, K, G]`; behind a text's end a state stays as it is."""
        dt = jax.nn.softplus(self._projected("dt", x_RTD).astype(jnp.float32) + self.dt_bias[...])
        dt = jnp.clip(dt, *self.facts.dt_limits).reshape(*x_RTD.shape[:2], self.facts.groups, -1)
        if lengths is None:
            return dt
        inside = jnp.arange(x_RTD.shape[1]) < lengths[:, None]
        return jnp.where(inside[..., None, None], dt, 0)

    def _projected(self, name: str, x_RTD: jax.Array) -> jax.Array:
        scale = self.facts.scales[_PROJECTED.index(name)]
        projected = vars(self)[name](x_RTD)
        return projected if scale == 1.0 else projected * scale

    def _gated(self, out: jax.Array, x_RTD: jax.Array) -> jax.Array:
        gate = jax.nn.silu(self._projected("gate", x_RTD).astype(jnp.float32))
        if self.facts.norm == "before_gate":
            return self.out_norm(out) * gate
        return out * gate if self.out_norm is None else self.out_norm(out * gate)


def _visible(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    return x if valid is None else x * valid[..., None].astype(x.dtype)
