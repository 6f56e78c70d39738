"""The one configurable encoder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.core.packed import Packed
from trl_jax.models.arch import EncoderArch
from trl_jax.models.encoder_block import CONVOLUTION, EMBEDDING, EncoderBlock, norm_of
from trl_jax.models.pooling import pool, valid_tokens
from trl_jax.models.stack import (
    apply,
    checkpointed,
    rope_inputs,
    rope_numbers,
    stacked,
    whole_layer,
    window_inputs,
)
from trl_jax.nn.attention.inputs import AttentionInputs, LayerInputs
from trl_jax.nn.attention.packed import seen_both_ways
from trl_jax.nn.convolution import Convolution
from trl_jax.nn.dropout import dropout_or_none
from trl_jax.nn.linear import Embedding, Linear
from trl_jax.nn.mlp import ACTIVATIONS
from trl_jax.nn.noise import Noise


class Encoder(nnx.Module):
    """Token ids to a vector for each text: normed embeddings, a scanned stack of blocks, pooling."""

    NAME = "encoder"

    def __init__(self, arch: EncoderArch):
        size = arch.embedding_size or arch.hidden_size
        learned, types, distances = arch.learned_positions, arch.type_vocab_size, arch.distances
        skipped = arch.padding_idx if arch.positions_skip_pads else None
        self.arch = arch
        self.embed = Embedding(arch.vocab_size, size, padding_idx=arch.padding_idx, axes=("vocab", "embed"))
        self.position_embed = None if learned is None else Embedding(learned, size, padding_idx=skipped)
        self.type_embed = Embedding(types, size) if types else None
        self.embed_norm = norm_of(arch, size)
        self.projection = Linear(size, arch.hidden_size, bias=True) if size != arch.hidden_size else None
        self.distance_embed = None if distances is None else Embedding(2 * distances.span, arch.hidden_size)
        self.distance_norm = norm_of(arch) if distances is not None and distances.normed else None
        conv = arch.convolution
        self.convolution = None if conv is None else Convolution(arch.hidden_size, conv.width, conv.groups)
        self.convolution_norm = None if conv is None else norm_of(arch)
        self.layers = stacked(lambda: EncoderBlock(arch), arch.num_layers)
        # Of the layers after the first: what that one reads is normed already.
        self.attention_norm = stacked(lambda: norm_of(arch), arch.num_layers - 1) if arch.prenorm else None
        self.norm = norm_of(arch) if arch.prenorm else None

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        reads: jax.Array,
        *,
        valid: jax.Array | None = None,
        lengths: jax.Array | None = None,
        packed: Packed | None = None,
        dtype: jnp.dtype = jnp.float32,
        remat: bool = False,
        dropout_key: jax.Array | None = None,
        noise: Noise | None = None,
        max_tokens: int | None = None,
    ) -> jax.Array:
        """The texts that are read, pooled as `arch.head.pooling` says: `[N, D]`, float32.

        Args:
            tokens, positions: int32 `[R, T]`.
            reads: int32 `[N]`, a token of each text that is wanted, row * T + place in the row; whichever it is.
            valid: bool `[R, T]`, tokens that others may see; None means the first `lengths` of each row.
            lengths: int32 `[R]`, the tokens of each row's text; None means all. Packed rows know their own.
            packed: where texts lie end to end in a row, sharing nothing; None where each row is a text.
            dtype, remat, dropout_key, noise, max_tokens: as in `Decoder.__call__`.
        """
        if packed is None:
            valid = valid_tokens(tokens, valid, lengths)
        else:
            packed = seen_both_ways(packed)
        shared, by_layer = self._layer_inputs(positions, valid, packed, dtype, max_tokens)
        graph, state = nnx.split(self.layers)

        def layer(h, slices):
            state, norm, inputs, key = slices
            x = h if norm is None else self._read(h, *norm)
            block = nnx.merge(graph, whole_layer(state, f"{self.NAME}.layers"))
            return block(h, x, shared.of_layer(inputs), key=key), None

        h = self._embedded(tokens, positions, dtype, dropout_key, noise, packed)
        keys = None if dropout_key is None else jax.random.split(dropout_key, self.arch.num_layers)
        slices = state, self._norms(), by_layer, keys
        if self.convolution is not None:  # parallel to the first layer alone
            first, slices = (jax.tree.map(lambda leaf, at=at: leaf[at], slices) for at in (0, slice(1, None)))
            alone = checkpointed(layer, remat=remat, turns=1)
            h = self._convolved(h, alone(h, first)[0], valid, dropout_key)
        turns = self.arch.num_layers - (self.convolution is not None)
        h, _ = jax.lax.scan(checkpointed(layer, remat=remat, turns=turns), h, slices)
        hidden = apply(self.norm, h).astype(jnp.float32)
        return pool(hidden, reads, self.arch.head.pooling, valid=valid, packed=packed)

    def _embedded(self, tokens, positions, dtype, dropout_key, noise, packed) -> jax.Array:
        arch = self.arch
        h = apply(noise, self.embed(tokens, dtype))
        if self.type_embed is not None:
            h = h + self.type_embed.weight[0].astype(dtype)
        if self.position_embed is not None:
            if arch.positions_skip_pads:
                positions = self._skipping_pads(tokens, packed)
            h = h + self.position_embed(positions, dtype)
        h = apply(dropout_or_none(arch.embedding_dropout, dropout_key, EMBEDDING), self.embed_norm(h))
        return apply(self.projection, h)

    def _skipping_pads(self, tokens: jax.Array, packed: Packed | None) -> jax.Array:
        real = tokens != self.arch.padding_idx
        numbers = jnp.cumsum(real, axis=1)
        if packed is not None:  # what stands before the token's own text does not count
            before = jnp.take_along_axis(numbers, packed.first - 1, axis=1, mode="clip")
            numbers = numbers - jnp.where(packed.first > 0, before, 0)
        return numbers * real + self.arch.padding_idx

    def _layer_inputs(
        self,
        positions: jax.Array,
        valid: jax.Array | None,
        packed: Packed | None,
        dtype: jnp.dtype,
        max_tokens: int | None,
    ) -> tuple[AttentionInputs, LayerInputs]:
        """Those of all layers, and those that differ."""
        arch = self.arch
        channels = arch.hidden_size // arch.num_heads
        longest = positions.shape[1] if packed is None else packed.longest[..., None, None]
        angles = rope_inputs(arch.ropes, positions, channels, longest)
        shared = AttentionInputs(channels**-0.5, valid=valid, packed=packed, **angles)
        if self.distance_embed is not None:
            table = apply(self.distance_norm, self.distance_embed.weight[...].astype(dtype))
            shared = shared._replace(distances=table)
        return shared, LayerInputs(rope_numbers(arch.ropes), window=window_inputs(arch.windows, max_tokens))

    def _norms(self) -> tuple[nnx.State, jax.Array] | None:
        """For each layer the parameters of its attention's norm, and whether it has one."""
        if self.attention_norm is None:
            return None
        _, state = nnx.split(self.attention_norm)
        filled = jax.tree.map(lambda leaf: jnp.pad(leaf, [(1, 0), (0, 0)]), state)
        return filled, jnp.arange(self.arch.num_layers) > 0

    def _read(self, h: jax.Array, norm: nnx.State, there: jax.Array) -> jax.Array:
        graph, _ = nnx.split(self.attention_norm)
        return jnp.where(there, nnx.merge(graph, norm)(h), h)

    def _convolved(self, embedded, h, valid, dropout_key) -> jax.Array:
        facts = self.arch.convolution
        near = self.convolution(jnp.where(valid[..., None], embedded, 0))
        near = apply(dropout_or_none(facts.dropout, dropout_key, CONVOLUTION), near)
        return self.convolution_norm(h + ACTIVATIONS[facts.activation](near))
