"""The gated short convolution of LFM2 (Liquid AI 2025, arXiv:2511.23404), in place of attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.cache.states import ConvolutionCache, ConvolutionInputs, RecurrentCache
from trl_jax.nn.linear import Linear


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
        """`[R, T, D]` to the same, and what the tokens that follow need; of `inputs` it takes valid, before and
        cache."""
        del dropout  # no family has any here
        if inputs.valid is not None:
            x_RTD = x_RTD * inputs.valid[..., None].astype(x_RTD.dtype)
        gated = self.in_gate(x_RTD) * self.value(x_RTD)
        seen_RTWD = with_tokens_before(gated, self.width - 1, inputs.before, inputs.cache)
        convolved = jnp.einsum("rtwd,dw->rtd", seen_RTWD, self.weight[:, 0].astype(gated.dtype))
        if self.bias is not None:
            convolved = convolved + self.bias[...].astype(gated.dtype)
        return self.o(self.out_gate(x_RTD) * convolved), ConvolutionInputs(seen_RTWD[:, :, 1:])


def silu_convolved(
    x_RTD: jax.Array, weight_DW: jax.Array, bias_D: jax.Array | None, inputs: AttentionInputs
) -> tuple[jax.Array, jax.Array]:
    """The SiLU of each channel's convolution over a token and those before it, float32 `[R, T, D]`, and the window
    `[R, T, W, D]` that the next token sees; the convolution of layers with a state."""
    width = weight_DW.shape[1]
    before = None if inputs.order is None else inputs.order.before
    seen_RTWD = with_tokens_before(x_RTD, width - 1, before, inputs.cache)
    weight = weight_DW.astype(x_RTD.dtype).astype(jnp.float32)
    convolved = sum(seen_RTWD[:, :, at].astype(jnp.float32) * weight[:, at] for at in range(width))
    if bias_D is not None:
        convolved = convolved + bias_D.astype(x_RTD.dtype).astype(jnp.float32)
    return jax.nn.silu(convolved.astype(x_RTD.dtype)).astype(jnp.float32), seen_RTWD[:, :, 1:]


def with_tokens_before(
    x_RTD: jax.Array, count: int, before: jax.Array | None, cache: ConvolutionCache | RecurrentCache | None
) -> jax.Array:
    """`x_RTD` of the `count` tokens before each and, last, of itself: `[R, T, count + 1, D]`; zeros before a text's
    first. `before` and `cache` as in `AttentionInputs`."""
    length = x_RTD.shape[1]
    if cache is not None:
        own = cache.window.astype(x_RTD.dtype).reshape(len(x_RTD), 1, count, -1)
    elif before is not None:
        own = jax.vmap(lambda row, places: row.at[places].get(mode="fill", fill_value=0))(x_RTD, before)
    else:
        padded = jnp.pad(x_RTD, [(0, 0), (count, 0), (0, 0)])
        own = jnp.stack([padded[:, place : place + length] for place in range(count)], axis=2)
    return jnp.concatenate([own, x_RTD[:, :, None]], axis=2)
