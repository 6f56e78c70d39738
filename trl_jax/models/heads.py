"""Heads that make scores of the hidden states that are read, and the models that have them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.models.arch import Arch, EncoderArch
from trl_jax.models.decoder import Decoder
from trl_jax.models.encoder import Encoder
from trl_jax.models.model import Model
from trl_jax.models.stack import apply
from trl_jax.nn.dropout import dropout_or_none
from trl_jax.nn.linear import Linear
from trl_jax.nn.mlp import ACTIVATIONS
from trl_jax.nn.norm import Norm

_BEFORE, _AFTER = 100, 101  # places of dropout, beside those of the trunk


class ScoreHead(Linear):
    """Hidden states `[N, D]` to scores `[N]`, in float32: the last step of a bfloat16 run is not rounded."""

    NAME = "score"

    def __init__(self, features: int):
        super().__init__(features, 1, axes=("", "embed"))

    def __call__(self, hidden: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        del dropout_key  # it has no dropout
        return super().__call__(hidden.astype(jnp.float32))[:, 0]


class EncoderHead(nnx.Module):
    """Pooled texts `[N, D]` to scores `[N]`, in the dtype of the input: a dense layer and an output, as `arch.head`
    says."""

    NAME = "head"

    def __init__(self, arch: EncoderArch):
        self.facts = arch.head
        self.dense = Linear(arch.hidden_size, arch.hidden_size, bias=arch.head.dense_bias)
        self.norm = Norm(arch.hidden_size, kind=arch.norm, eps=arch.norm_eps) if arch.head.normed else None
        self.out = Linear(arch.hidden_size, 1, bias=True, axes=("", "embed"))

    def __call__(self, pooled: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        facts = self.facts
        pooled = apply(dropout_or_none(facts.dropout_before, dropout_key, _BEFORE), pooled)
        pooled = apply(self.norm, ACTIVATIONS[facts.activation](self.dense(pooled)))
        return self.out(apply(dropout_or_none(facts.dropout_after, dropout_key, _AFTER), pooled))[:, 0]


class Scorer(Model):
    """A trunk with a head that gives a score."""

    def outputs(
        self,
        hidden: jax.Array,
        targets: jax.Array | None,
        dtype: jnp.dtype,
        dropout_key: jax.Array | None,
        temperature: float,
    ) -> jax.Array:
        del targets, dtype, temperature
        return vars(self)[self.head_name](hidden, dropout_key)


class SequenceScorer(Scorer):
    """A decoder that gives each token that is read a score."""

    needs_valid = False  # pads stand to the right of every token that is read

    def __init__(self, arch: Arch):
        super().__init__(Decoder(arch), ScoreHead(arch.head_inputs))


class EncoderScorer(Scorer):
    """An encoder that gives each text that is read a score."""

    needs_valid = True  # a pad to the right would be seen

    def __init__(self, arch: EncoderArch):
        super().__init__(Encoder(arch), EncoderHead(arch))
