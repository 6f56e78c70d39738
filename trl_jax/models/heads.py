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
    """A decoder that gives each token that is read one number."""

    needs_valid = False  # pads stand to the right of every token that is read, and texts may lie end to end

    def __init__(self, arch: Arch):
        self.decoder = Decoder(arch)
        self.score = Linear(arch.hidden_size, 1)

    def __call__(self, tokens: jax.Array, positions: jax.Array, reads: jax.Array, **how) -> jax.Array:
        """Scores `[N]`, float32 from the head on: the last step of a bfloat16 run is not rounded.

        Args:
            tokens, positions: int32 `[R, T]`.
            reads: int32 `[N]`, the places that are scored, row * T + place in the row.
            how: the options of `Decoder.__call__`.
        """
        return self.score(self.decoder(tokens, positions, reads, **how).astype(jnp.float32))[:, 0]


class EncoderScorer(nnx.Module):
    """An encoder that gives each text one number, made of its first token or of the mean of all."""

    needs_valid = True

    def __init__(self, arch: EncoderArch):
        self.encoder = Encoder(arch)
        self.head, self.pooling = EncoderHead(arch), arch.head.pooling

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        reads: jax.Array,
        *,
        valid: jax.Array | None = None,
        packed: Packed | None = None,
        dropout_key: jax.Array | None = None,
        **how,
    ) -> jax.Array:
        """Scores `[N]` of the texts that are read; float32 from the head on.

        Args:
            tokens, positions: int32 `[R, T]`.
            reads: int32 `[N]`, a token of each text that is scored, row * T + place in the row; whichever it is.
            valid: bool `[R, T]`, False at pads; None in packed rows.
            packed: where texts lie end to end in a row, sharing nothing; None where each row is a text.
            dropout_key: turns dropout on, at the rates in the config.
            how: the other options of `Encoder.__call__`.
        """
        packed = None if packed is None else seen_both_ways(packed)
        how |= {"valid": valid, "packed": packed, "dropout_key": dropout_key}
        hidden = self.encoder(tokens, positions, **how).astype(jnp.float32)
        rows, length = reads // tokens.shape[1], tokens.shape[1]
        if packed is None:
            pooled = self._of_rows(hidden, valid)[rows]
        else:
            first, end = (y.reshape(-1)[reads] + rows * length for y in (packed.first, packed.end))
            pooled = self._of_texts(hidden.reshape(-1, hidden.shape[-1]), first, end)
        return self.head(pooled, dropout_key)

    def _of_rows(self, hidden: jax.Array, valid: jax.Array) -> jax.Array:
        """Of rows `[R, T, D]` with one text each: `[R, D]`."""
        if self.pooling == "first":
            return hidden[:, 0]
        visible = valid[..., None].astype(hidden.dtype)
        return jnp.sum(hidden * visible, axis=1) / jnp.sum(visible, axis=1)

    def _of_texts(self, hidden: jax.Array, first: jax.Array, end: jax.Array) -> jax.Array:
        """Of packed rows end to end `[R x T, D]`, texts from `first` up to but without `end`: `[N, D]`."""
        if self.pooling == "first":
            return jnp.take(hidden, first, axis=0, mode="clip")  # a place without a text begins behind the end
        place = jnp.arange(len(hidden))
        inside = ((place >= first[:, None]) & (place < end[:, None])).astype(hidden.dtype)
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
