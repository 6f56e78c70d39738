"""Attention and Mamba-2 side by side (Falcon-H1: Zuo et al. 2025, arXiv:2507.22448)."""

from __future__ import annotations

import jax
from flax import nnx

from trl_jax.nn.attention.causal import Attention
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.cache.cache import BothKept
from trl_jax.nn.dropout import Dropout
from trl_jax.nn.recurrent.mamba2 import Mamba2


class ParallelMixers(nnx.Module):
    """The sum of what both make of a layer's input; `scales` is a models.arch.MixerScales."""

    def __init__(self, attention: Attention, mamba: Mamba2, scales):
        self.attention, self.mamba, self.scales = attention, mamba, scales

    def __call__(
        self, x_RTD: jax.Array, inputs: AttentionInputs, dropout: Dropout | None = None
    ) -> tuple[jax.Array, BothKept]:
        """`[R, T, D]` to the same, and what either keeps; `dropout` is attention's."""
        scales, caches = self.scales, (None, None) if inputs.cache is None else inputs.cache
        attended, keys_values = self.attention(
            x_RTD * scales.attention_in, inputs._replace(cache=caches[0]), dropout
        )
        mixed, state = self.mamba(x_RTD * scales.mamba_in, inputs._replace(cache=caches[1]))
        return attended * scales.attention_out + mixed * scales.mamba_out, BothKept(keys_values, state)
