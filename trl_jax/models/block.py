"""One layer of the decoder."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.core.router_sums import RouterSums
from trl_jax.models.arch import BLOCKS, Arch, LayerKind
from trl_jax.models.experts_beside import ExpertsBeside
from trl_jax.models.stack import apply
from trl_jax.nn.attention.causal import Attention
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.attention.latent import LatentAttention
from trl_jax.nn.cache.cache import Kept, NothingKept
from trl_jax.nn.dropout import dropout_or_none
from trl_jax.nn.experts.moe import MoE
from trl_jax.nn.layer_embedding import LayerInput
from trl_jax.nn.mlp import MLP
from trl_jax.nn.norm import Norm
from trl_jax.nn.parallel_mixers import ParallelMixers
from trl_jax.nn.recurrent.delta_net import GatedDeltaNet
from trl_jax.nn.recurrent.mamba2 import Mamba2
from trl_jax.nn.recurrent.short_convolution import GatedShortConvolution

EMBEDDING, _ATTENTION, _ATTENTION_OUT, _MLP_OUT = range(4)  # places of dropout


class BlockOutputs(NamedTuple):
    """h: the residual stream `[R, T, D]`. kept: what the tokens that follow need of these. sums: the router's, None if
    none asked."""

    h: jax.Array
    kept: Kept
    sums: RouterSums | None


class Block(nnx.Module):
    """One layer: attention, or what stands in its place, and MLP with the norms that `arch.block` names, one after the
    other or side by side; of some kinds one of the two alone, with its own norms."""

    def __init__(self, arch: Arch, kind: LayerKind):
        def norm(name: str) -> Norm | None:
            there = name in BLOCKS[arch.block] and (kind.mlp if name.startswith("mlp") else kind.mixer is not None)
            return Norm(arch.hidden_size, kind=arch.norm, eps=arch.norm_eps) if there else None

        self.attention_norm, self.attention_out_norm = norm("attention_norm"), norm("attention_out_norm")
        self.mlp_norm, self.mlp_out_norm = norm("mlp_norm"), norm("mlp_out_norm")
        self.attention = None if kind.mixer is None else _mixer(arch, kind)
        self.mlp = _mlp(arch, kind) if kind.mlp else None
        self.beside = ExpertsBeside(arch) if kind.experts and arch.experts.beside_mlp else None
        self.layer_input = None if arch.layer_embedding is None else LayerInput(arch)
        self.layer_scalar = nnx.Param(jnp.ones(1, jnp.float32), axes=("",)) if arch.layer_scalar else None
        self.arch, self.kind = arch, kind

    def __call__(
        self,
        h: jax.Array,
        inputs: AttentionInputs,
        *,
        dtype: jnp.dtype,
        key: jax.Array | None = None,
        router_key: jax.Array | None = None,
        router_token_count: jax.Array | None = None,
    ) -> BlockOutputs:
        """From `h` `[R, T, D]`; routers are summed over tokens, `router_token_count` `[R, T]` times each, if that is
        given; `key` turns dropout on, and `router_key` the draws of a sparse mixer.

        Attention and MLP compute in `dtype`, the residual stream that they are added to stays float32, as under torch's
        autocast.
        """
        sums_normed = self.arch.block == "normed_sums"
        x = (h if sums_normed else apply(self.attention_norm, h)).astype(dtype)
        attended, kept = (0.0, NothingKept()) if self.attention is None else self._attend(x, inputs, key)
        if self.mlp is None:
            return BlockOutputs(h + attended, kept, None)
        if self.arch.block == "parallel":
            h = h + attended
        elif self.arch.block == "parallel_two_norms":
            x, h = self.mlp_norm(h).astype(dtype), h + attended
        elif sums_normed:
            h = self.attention_norm(h + attended)
            x = h.astype(dtype)
        else:
            h = h + attended
            x = apply(self.mlp_norm, h).astype(dtype)
        if router_key is not None and self.kind.experts:
            x = self.arch.experts.sparse_mixer.jittered(x, router_key)
        sums = None
        if router_token_count is not None and self.kind.experts:
            sums = self._router_sums(x, h, router_token_count)
        h = h + self._feed(x, h, key, router_key)
        return BlockOutputs(self.mlp_norm(h) if sums_normed else self._ended(h, inputs, dtype), kept, sums)

    def _attend(self, x: jax.Array, inputs: AttentionInputs, key: jax.Array | None) -> tuple[jax.Array, Kept]:
        arch = self.arch
        dropout = dropout_or_none(arch.attention_dropout, key, _ATTENTION)
        out, kept = self.attention(x, inputs, dropout)
        out = apply(self.attention_out_norm, out)
        out = apply(dropout_or_none(arch.attention_out_dropout, key, _ATTENTION_OUT), out)
        return scaled(out, arch.residual_scale), kept

    def _router_sums(self, x: jax.Array, h: jax.Array, router_token_count: jax.Array) -> RouterSums:
        if self.beside is None:
            return self.mlp.router_sums(x, router_token_count)
        return self.beside.router_sums(h, router_token_count, x.dtype)

    def _feed(
        self, x: jax.Array, h: jax.Array, key: jax.Array | None, router_key: jax.Array | None
    ) -> jax.Array:
        arch, drawn = self.arch, router_key is not None and self.kind.experts
        out = self.mlp(x, key=router_key) if drawn else self.mlp(x)
        out = apply(self.mlp_out_norm, out if self.beside is None else self.beside(out, h))
        return scaled(apply(dropout_or_none(arch.mlp_out_dropout, key, _MLP_OUT), out), arch.residual_scale)

    def _ended(self, h: jax.Array, inputs: AttentionInputs, dtype: jnp.dtype) -> jax.Array:
        if self.layer_input is not None:
            h = h + self.layer_input(h.astype(dtype), inputs.embedded)
        return h if self.layer_scalar is None else h * jax.lax.stop_gradient(self.layer_scalar[...])


def _mixer(
    arch: Arch, kind: LayerKind
) -> Attention | LatentAttention | GatedShortConvolution | GatedDeltaNet | Mamba2 | ParallelMixers:
    if kind.mixer == "attention+mamba":
        mamba = Mamba2(arch.hidden_size, arch.state_space, eps=arch.norm_eps)
        return ParallelMixers(Attention(arch, kind), mamba, arch.mixer_scales)
    if kind.mixer == "mamba":
        return Mamba2(arch.hidden_size, arch.state_space, eps=arch.norm_eps)
    if kind.mixer == "delta_net":
        return GatedDeltaNet(arch.hidden_size, arch.gated_delta, eps=arch.norm_eps)
    if kind.mixer == "convolution":
        return GatedShortConvolution(arch.hidden_size, arch.short_convolution)
    return Attention(arch, kind) if arch.latent is None else LatentAttention(arch)


def _mlp(arch: Arch, kind: LayerKind) -> MLP | MoE:
    if kind.experts and not arch.experts.beside_mlp:
        return MoE(arch.hidden_size, arch.experts, activation=arch.activation)
    maps = {"activation": arch.activation, "gated": arch.gated, "bias": arch.mlp_bias}
    return MLP(arch.hidden_size, kind.mlp_size or arch.mlp_size, scales=arch.mlp_scales, **maps)


def scaled(x: jax.Array, scale: float) -> jax.Array:
    return x if scale == 1.0 else x * scale
