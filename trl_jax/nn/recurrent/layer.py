"""The common part of layers with a state: linear maps into short convolutions, and a state that each text begins."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.cache.states import RecurrentState
from trl_jax.nn.linear import Linear
from trl_jax.nn.recurrent.short_convolution import silu_convolved


class Recurrent(nnx.Module):
    """Parts of the input are mapped and convolved, and scanned along each text by `_scan`, or by `_step` where a cache
    has the state before a token. Of tokens that others may not see, `_hides_convolved` hides what was convolved, too.

    The weights of the convolutions lie as on disk, (channels, 1, width), that of the token itself last.

    Args:
        parts: the channels of each convolved part. Those of the one called `values` are of value heads, the others'
            of key heads.
        bias, convolution_bias: whether the maps, and the convolutions, have one.
    """

    _hides_convolved: bool
    _scan: Callable[..., tuple[jax.Array, jax.Array]]
    _step: Callable[..., tuple[jax.Array, jax.Array]]

    def __init__(
        self,
        features: int,
        parts: Mapping[str, int],
        *,
        values: str,
        width: int,
        bias: bool = False,
        convolution_bias: bool = False,
    ):
        for name, size in parts.items():
            axis = "heads" if name == values else "kv"
            setattr(self, name, Linear(features, size, bias=bias, axes=(axis, "embed")))
            weight = jnp.zeros((size, 1, width), jnp.float32)
            setattr(self, f"{name}_convolution", nnx.Param(weight, axes=(axis, "", "")))
            if convolution_bias:
                setattr(self, f"{name}_convolution_bias", nnx.Param(jnp.zeros(size, jnp.float32), axes=(axis,)))
        self.parts, self.convolution_bias = tuple(parts.items()), convolution_bias

    def __call__(
        self, x_RTD: jax.Array, inputs: AttentionInputs, dropout: None = None
    ) -> tuple[jax.Array, RecurrentState]:
        """`[R, T, D]` to the same, and what the tokens that follow need; of `inputs` it takes valid, order, lengths and
        cache."""
        del dropout  # no family has any here
        if inputs.striped is not None:
            raise ValueError("A layer with a state has the whole of a text on one device: leave sequence at 1.")
        x_RTD, order = _visible(x_RTD, inputs.valid), inputs.order
        x_RTD = x_RTD if order is None else order.ordered(x_RTD)
        parts, window = self._convolved(x_RTD, inputs)
        given = self._given(x_RTD, parts, inputs.lengths)
        if inputs.cache is None:
            out, state = self._scan(*given, order)
        else:
            before = inputs.cache.state.reshape(len(x_RTD), *inputs.cache.state.shape[-4:])
            out, state = self._step(*(y[:, 0] for y in given), before)
        out = self._closed(out.reshape(*x_RTD.shape[:2], -1), x_RTD, parts)
        return out if order is None else order.restored(out), RecurrentState(window, state)

    @abstractmethod
    def _projected(self, name: str, x_RTD: jax.Array) -> jax.Array:
        """The result of one of the maps, `[R, T, channels]`."""

    @abstractmethod
    def _given(self, x_RTD: jax.Array, parts: list[jax.Array], lengths: jax.Array | None) -> tuple[jax.Array, ...]:
        """The arguments of `_scan` for all tokens, `[R, T, ...]` each, and `_step` of one; `parts` are convolved."""

    @abstractmethod
    def _closed(self, out: jax.Array, x_RTD: jax.Array, parts: list[jax.Array]) -> jax.Array:
        """The layer's results `[R, T, D]`, of outputs `[R, T, channels]`."""

    def _convolved(self, x_RTD: jax.Array, inputs: AttentionInputs) -> tuple[list[jax.Array], jax.Array]:
        """The convolved parts, float32 `[R, T, channels]` each, and the window of the convolution."""

        def of_all(ending: str) -> jax.Array:
            return jnp.concatenate([vars(self)[f"{name}_convolution{ending}"][...] for name, _ in self.parts])

        projected = jnp.concatenate([self._projected(name, x_RTD) for name, _ in self.parts], axis=-1)
        bias = of_all("_bias") if self.convolution_bias else None
        convolved, window = silu_convolved(projected, of_all("")[:, 0], bias, inputs)
        ends = [sum(size for _, size in self.parts[:number]) for number in range(1, len(self.parts))]
        convolved = _visible(convolved, inputs.valid) if self._hides_convolved else convolved
        return jnp.split(convolved, ends, axis=-1), window


def inside(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Numbers `[R, T, ...]` of tokens, zeros behind the texts' ends, where a state then stays as it is."""
    if lengths is None:
        return x
    within = jnp.arange(x.shape[1]) < lengths[:, None]
    return jnp.where(within.reshape(*within.shape, *(1,) * (x.ndim - 2)), x, 0)


def _visible(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    return x if valid is None else x * valid[..., None].astype(x.dtype)
