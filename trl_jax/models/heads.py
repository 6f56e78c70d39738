"""What stands on top of a trunk."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.models.arch import Arch
from trl_jax.models.decoder import Decoder
from trl_jax.models.encoder import Encoder
from trl_jax.models.encoder_arch import EncoderArch
from trl_jax.models.stack import apply
from trl_jax.nn.dropout import dropout_or_none
from trl_jax.nn.linear import Linear
from trl_jax.nn.mlp import ACTIVATIONS
from trl_jax.nn.norm import Norm

_BEFORE, _AFTER = 100, 101  # places of dropout, beside those of the trunk


class SequenceScorer(nnx.Module):
    """A decoder that gives each row one number, read at one of its tokens."""

    needs_valid = False  # pads stand to the right of every token that is read, and texts may lie end to end

    def __init__(self, arch: Arch):
        self.decoder = Decoder(arch)
        self.score = Linear(arch.hidden_size, 1)

    def __call__(self, tokens: jax.Array, positions: jax.Array, *, at: jax.Array, **how) -> jax.Array:
        """Scores `[R]`, float32 from the head on: the last step of a bfloat16 run is not rounded.

        Args:
            tokens, positions: int32 `[R, T]`.
            at: int32 `[R]`, where each row is read.
            how: the options of `Decoder.__call__`.
        """
        return self.score(self.decoder(tokens, positions, at=at, **how).astype(jnp.float32))[:, 0]


class EncoderScorer(nnx.Module):
    """An encoder that gives each row one number, read at its first token or from the mean of all."""

    needs_valid = True

    def __init__(self, arch: EncoderArch):
        self.encoder = Encoder(arch)
        self.head = EncoderHead(arch)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        *,
        valid: jax.Array,
        at: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
        **how,
    ) -> jax.Array:
        """Scores `[R]`, float32 from the head on.

        Args:
            tokens, positions: int32 `[R, T]`.
            valid: bool `[R, T]`, False at pads.
            at: not used, the head knows where to read.
            dropout_key: turns dropout on, at the rates in the config.
            how: the other options of `Encoder.__call__`.
        """
        del at
        hidden = self.encoder(tokens, positions, valid=valid, dropout_key=dropout_key, **how)
        return self.head(hidden.astype(jnp.float32), valid, dropout_key)


class EncoderHead(nnx.Module):
    """Hidden states `[R, T, D]` to scores `[R]`, as `arch.head` says."""

    def __init__(self, arch: EncoderArch):
        self.facts = arch.head
        self.dense = Linear(arch.hidden_size, arch.hidden_size, bias=arch.head.dense_bias)
        self.norm = Norm(arch.hidden_size, kind=arch.norm, eps=arch.norm_eps) if arch.head.normed else None
        self.out = Linear(arch.hidden_size, 1, bias=True)

    def __call__(self, hidden: jax.Array, valid: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        facts = self.facts
        if facts.pooling == "mean":
            visible = valid[..., None].astype(hidden.dtype)
            pooled = jnp.sum(hidden * visible, axis=1) / jnp.sum(visible, axis=1)
        else:
            pooled = hidden[:, 0]
        pooled = apply(dropout_or_none(facts.dropout_before, dropout_key, _BEFORE), pooled)
        pooled = apply(self.norm, ACTIVATIONS[facts.activation](self.dense(pooled)))
        return self.out(apply(dropout_or_none(facts.dropout_after, dropout_key, _AFTER), pooled))[:, 0]
