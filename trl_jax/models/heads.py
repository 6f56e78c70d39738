"""What stands on top of a trunk."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.core.packed import Packed
from trl_jax.models.arch import Arch
from trl_jax.models.decoder import Decoder
from trl_jax.models.encoder import Encoder
from trl_jax.models.encoder_arch import EncoderArch
from trl_jax.models.stack import apply
from trl_jax.nn.dropout import dropout_or_none
from trl_jax.nn.linear import Linear
from trl_jax.nn.mlp import ACTIVATIONS
from trl_jax.nn.norm import Norm
from trl_jax.nn.packed_attention import seen_both_ways

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
        self.head, self.pooling = EncoderHead(arch), arch.head.pooling

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        *,
        valid: jax.Array | None = None,
        at: jax.Array | None = None,
        packed: Packed | None = None,
        dropout_key: jax.Array | None = None,
        **how,
    ) -> jax.Array:
        """Scores `[R]`, or those of the texts of a stream; float32 from the head on.

        Args:
            tokens, positions: int32 `[R, T]`.
            valid: bool `[R, T]`, False at pads; None in a stream.
            at: in a single row that is a `stream`, a token of each text; else not used, a row is a text.
            stream: where texts lie in it end to end, sharing nothing.
            dropout_key: turns dropout on, at the rates in the config.
            how: the other options of `Encoder.__call__`.
        """
        packed = None if packed is None else seen_both_ways(packed)
        how |= {"valid": valid, "packed": packed, "dropout_key": dropout_key}
        hidden = self.encoder(tokens, positions, **how).astype(jnp.float32)
        pooled = self._of_rows(hidden, valid) if packed is None else self._of_texts(hidden[0], packed, at)
        return self.head(pooled, dropout_key)

    def _of_rows(self, hidden: jax.Array, valid: jax.Array) -> jax.Array:
        if self.pooling == "first":
            return hidden[:, 0]
        visible = valid[..., None].astype(hidden.dtype)
        return jnp.sum(hidden * visible, axis=1) / jnp.sum(visible, axis=1)

    def _of_texts(self, hidden: jax.Array, packed: Packed, at: jax.Array) -> jax.Array:
        start, end, place = packed.first[0, at], packed.end[0, at], jnp.arange(len(hidden))
        if self.pooling == "first":
            return jnp.take(hidden, start, axis=0, mode="clip")  # a place without a text begins behind the end
        inside = ((place >= start[:, None]) & (place < end[:, None])).astype(hidden.dtype)
        return inside @ hidden / jnp.maximum(jnp.sum(inside, axis=1, keepdims=True), 1)


class EncoderHead(nnx.Module):
    """What was pooled of each text, `[N, D]`, to scores `[N]`, as `arch.head` says."""

    def __init__(self, arch: EncoderArch):
        self.facts = arch.head
        self.dense = Linear(arch.hidden_size, arch.hidden_size, bias=arch.head.dense_bias)
        self.norm = Norm(arch.hidden_size, kind=arch.norm, eps=arch.norm_eps) if arch.head.normed else None
        self.out = Linear(arch.hidden_size, 1, bias=True)

    def __call__(self, pooled: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        facts = self.facts
        pooled = apply(dropout_or_none(facts.dropout_before, dropout_key, _BEFORE), pooled)
        pooled = apply(self.norm, ACTIVATIONS[facts.activation](self.dense(pooled)))
        return self.out(apply(dropout_or_none(facts.dropout_after, dropout_key, _AFTER), pooled))[:, 0]
