"""The gated short convolution of LFM2 (Liquid AI 2025, arXiv:2511.23404), in place of attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.core.packed import Packed
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.kv_cache import ConvolutionInputs
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
        seen_RTWD = jnp.concatenate([self._before(gated, inputs), gated[:, :, None]], axis=2)
        convolved = jnp.einsum("rtwd,dw->rtd", seen_RTWD, self.weight[:, 0].astype(gated.dtype))
        if self.bias is not None:
            convolved = convolved + self.bias[...].astype(gated.dtype)
        return self.o(self.out_gate(x_RTD) * convolved), ConvolutionInputs(seen_RTWD[:, :, 1:])

    def _before(self, gated: jax.Array, inputs: AttentionInputs) -> jax.Array:
        """The inputs of the `width` - 1 tokens before each, `[R, T, width - 1, D]`; zeros before a text's first."""
        count, length = self.width - 1, gated.shape[1]
        if inputs.cache is not None:
            return inputs.cache.window.astype(gated.dtype).reshape(len(gated), 1, count, -1)
        if inputs.before is not None:
            return jax.vmap(lambda row, places: row.at[places].get(mode="fill", fill_value=0))(gated, inputs.before)
        padded = jnp.pad(gated, [(0, 0), (count, 0), (0, 0)])
        return jnp.stack([padded[:, place : place + length] for place in range(count)], axis=2)


def places_before(packed: Packed, count: int) -> jax.Array:
    """The places of the `count` tokens before each token in its text, the nearest last: int32 `[R, T, count]`; T where
    there is none. Before a branch comes its context, before the first token of an answer its prompt."""
    length = packed.first.shape[1]
    place = jnp.arange(length, dtype=jnp.int32)
    last = jnp.where(place > packed.first, place - 1, length)  # of the token's own range
    if packed.context is not None:
        ends = jnp.where(packed.context_end > packed.context, packed.context_end - 1, length)
        last = jnp.where(place > packed.first, place - 1, ends)
    if packed.prompt is not None:  # an answer before its prompt lies in reverse order: see core.packed.Packed
        nearer = jnp.where(place + 1 < packed.prompt, place + 1, packed.end - 1)
        last = jnp.where(place < packed.prompt, nearer, last)
    last = jnp.where(packed.first < length, last, length).astype(jnp.int32)  # padding
    found = [last]
    while len(found) < count:
        found.append(jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=length))(last, found[-1]))
    return jnp.stack(found[::-1], axis=-1)
