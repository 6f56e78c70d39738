"""The gated short convolution of LFM2 (Liquid AI 2025, arXiv:2511.23404), in place of attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.cache.states import ConvolutionCache, ConvolutionInputs, RecurrentCache
from trl_jax.nn.linear import Linear
from trl_jax.nn.recurrent.text_order import PreviousTokens


class GatedShortConvolution(nnx.Module):
    """`o(out_gate(x) * convolved(in_gate(x) * value(x)))`, each channel by itself over a token and those before it.

    `facts` is a models.arch.ShortConvolution. The weight of the convolution lies as on disk, (D, 1, width), that of the
    token itself last.
    """

    def __init__(self, features: int, facts):
        for name in ("in_gate", "out_gate", "value"):
            setattr(self, name, Linear(features, features, bias=facts.bias, axes=("heads", "embed")))
        self.o = Linear(features, features, bias=facts.bias, axes=("embed", "heads"))
        self.weight = nnx.Param(jnp.zeros((features, 1, facts.width), jnp.float32), axes=("heads", "", ""))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32), axes=("heads",)) if facts.bias else None
        self.width = facts.width

    def __call__(
        self, x_RTD: jax.Array, inputs: AttentionInputs, dropout: None = None
    ) -> tuple[jax.Array, ConvolutionInputs]:
        """`[R, T, D]` to the same, and what the tokens that follow need; of `inputs` it takes valid, previous and
        cache."""
        del dropout  # no family has any here
        if inputs.valid is not None:
            x_RTD = x_RTD * inputs.valid[..., None].astype(x_RTD.dtype)
        gated = self.in_gate(x_RTD) * self.value(x_RTD)
        convolved, window_RTWD = _convolved(gated, self.weight[:, 0], inputs.previous, inputs.cache)
        convolved = convolved.astype(gated.dtype)
        if self.bias is not None:
            convolved = convolved + self.bias[...].astype(gated.dtype)
        return self.o(self.out_gate(x_RTD) * convolved), ConvolutionInputs(window_RTWD)


def silu_convolved(
    x_RTD: jax.Array, weight_DW: jax.Array, bias_D: jax.Array | None, inputs: AttentionInputs
) -> tuple[jax.Array, jax.Array]:
    """The SiLU of each channel's convolution over a token and those before it, float32 `[R, T, D]`, and the window
    `[R, T, W, D]` that the next token sees; the convolution of layers with a state."""
    previous = None if inputs.order is None else inputs.order.previous
    convolved, window = _convolved(x_RTD, weight_DW, previous, inputs.cache)
    if bias_D is not None:
        convolved = convolved + bias_D.astype(x_RTD.dtype).astype(jnp.float32)
    return jax.nn.silu(convolved.astype(x_RTD.dtype)).astype(jnp.float32), window


def _convolved(
    x_RTD: jax.Array,
    weight_DW: jax.Array,
    previous: PreviousTokens | None,
    cache: ConvolutionCache | RecurrentCache | None,
) -> tuple[jax.Array, jax.Array]:
    """Sums of products, float32 `[R, T, D]`, and the window; `previous` and `cache` as in `AttentionInputs`."""
    seen = [*_previous(x_RTD, weight_DW.shape[1] - 1, previous, cache), x_RTD]
    weight = weight_DW.astype(x_RTD.dtype).astype(jnp.float32)
    convolved = sum(x.astype(jnp.float32) * weight[:, at] for at, x in enumerate(seen))
    return convolved, jnp.stack(seen[1:], axis=2)


def _previous(
    x_RTD: jax.Array, count: int, previous: PreviousTokens | None, cache: ConvolutionCache | RecurrentCache | None
) -> list[jax.Array]:
    """`x_RTD` of the `count` tokens before each, the nearest last, each `[R, T, D]`; zeros before a text's first."""
    if cache is not None:
        window = cache.window.astype(x_RTD.dtype).reshape(len(x_RTD), 1, count, -1)
        return [window[:, :, at] for at in range(count)]
    if previous is not None and previous.places is not None:
        gathered = jax.vmap(lambda row, places: row.at[places].get(mode="fill", fill_value=0))
        return [gathered(x_RTD, previous.places[..., at]) for at in range(count)]
    padded = jnp.pad(x_RTD, [(0, 0), (count, 0), (0, 0)])
    earlier = [padded[:, at : at + x_RTD.shape[1]] for at in range(count)]
    if previous is None:
        return earlier
    return [jnp.where(previous.within[..., at, None], x, 0) for at, x in enumerate(earlier)]
