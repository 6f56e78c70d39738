"""One layer of the encoder."""

from __future__ import annotations

import jax
from flax import nnx

from trl_jax.models.arch import EncoderArch
from trl_jax.models.stack import apply
from trl_jax.nn.attention.bidirectional import BidirectionalAttention
from trl_jax.nn.attention.disentangled import DisentangledAttention
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.dropout import dropout_or_none
from trl_jax.nn.mlp import MLP
from trl_jax.nn.norm import Norm

EMBEDDING, _ATTENTION, _ATTENTION_OUT, _MLP, _MLP_OUT, _DISTANCES, CONVOLUTION = range(7)  # places of dropout


def norm_of(arch: EncoderArch, size: int | None = None) -> Norm:
    return Norm(size or arch.hidden_size, kind=arch.norm, eps=arch.norm_eps)


class EncoderBlock(nnx.Module):
    """One layer: attention and MLP, each sum normed or, with `arch.prenorm`, what they read."""

    def __init__(self, arch: EncoderArch):
        if arch.distances is None:
            self.attention = BidirectionalAttention(arch.hidden_size, arch.num_heads, bias=arch.attention_bias)
        else:
            self.attention = DisentangledAttention(arch.hidden_size, arch.num_heads, arch.distances)
        self.attention_out_norm = None if arch.prenorm else norm_of(arch)
        self.mlp_norm = norm_of(arch) if arch.prenorm else None
        self.mlp = MLP(
            arch.hidden_size, arch.mlp_size, activation=arch.activation, gated=arch.gated, bias=arch.mlp_bias
        )
        self.mlp_out_norm = None if arch.prenorm else norm_of(arch)
        self.arch = arch

    def __call__(self, h: jax.Array, x: jax.Array, inputs: AttentionInputs, *, key: jax.Array | None) -> jax.Array:
        """`[R, T, D]` to the same; `x` is `h` as attention reads it, `key` turns dropout on."""
        arch = self.arch
        if arch.distances is not None:
            table = apply(dropout_or_none(arch.distance_dropout, key, _DISTANCES), inputs.distances)
            inputs = inputs._replace(distances=table)
        attended = self.attention(x, inputs, dropout_or_none(arch.attention_dropout, key, _ATTENTION))
        attended = apply(dropout_or_none(arch.attention_out_dropout, key, _ATTENTION_OUT), attended)
        h = apply(self.attention_out_norm, h + attended)
        fed = self.mlp(apply(self.mlp_norm, h), dropout=dropout_or_none(arch.mlp_dropout, key, _MLP))
        fed = apply(dropout_or_none(arch.mlp_out_dropout, key, _MLP_OUT), fed)
        return apply(self.mlp_out_norm, h + fed)
