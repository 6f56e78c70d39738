"""The encoder: blocks, trunk and pooling. All encoder models are configurations of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.core.outputs import Packed
from trl_jax.models.arch import EncoderArch
from trl_jax.models.decoder import apply, checkpointed, rope_inputs, rope_numbers, stacked, whole_layer, window_inputs
from trl_jax.nn.attention.attention import BidirectionalAttention
from trl_jax.nn.attention.disentangled import DisentangledAttention
from trl_jax.nn.attention.inputs import AttentionInputs, LayerInputs
from trl_jax.nn.attention.packed import seen_both_ways
from trl_jax.nn.layers import ACTIVATIONS, MLP, Convolution, Noise, Norm
from trl_jax.nn.linear import Embedding, Linear, Stream, dropout_or_none, stream_keys

# The encoder


class Encoder(nnx.Module):
    """Token ids to one vector per text: normed embeddings, a scanned stack of blocks, pooling."""

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
        # For the layers after the first: the first layer's input is already normed.
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
        """The texts that are read, pooled by `arch.head.pooling`: `[N, D]`, float32.

        Args:
            tokens, positions: int32 `[R, T]`.
            reads: int32 `[N]`, the flat index (row * T + column) of any token of each text to return.
            valid: bool `[R, T]`, tokens that others may attend to; None: the first `lengths` of each row.
            lengths: int32 `[R]`, the length of each row's text; None: all of T. Not used for packed rows.
            packed: what each token attends to, for packed rows of independent texts; None for one text per row.
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
            x = h if norm is None else self._attention_input(h, *norm)
            block = nnx.merge(graph, whole_layer(state, f"{self.NAME}.layers"))
            return block(h, x, shared.of_layer(inputs), key=key), None

        h = self._embedded(tokens, positions, dtype, dropout_key, noise, packed)
        keys = stream_keys(dropout_key, Stream.LAYERS, self.arch.num_layers)
        slices = state, self._attention_norms(), by_layer, keys
        if self.convolution is not None:  # parallel to the first layer only
            first, slices = (jax.tree.map(lambda leaf, at=at: leaf[at], slices) for at in (0, slice(1, None)))
            alone = checkpointed(layer, remat=remat, length=1)
            h = self._add_convolution(h, alone(h, first)[0], valid, dropout_key)
        length = self.arch.num_layers - (self.convolution is not None)
        h, _ = jax.lax.scan(checkpointed(layer, remat=remat, length=length), h, slices)
        hidden = apply(self.norm, h).astype(jnp.float32)
        return pool(hidden, reads, self.arch.head.pooling, valid=valid, packed=packed)

    def _embedded(self, tokens, positions, dtype, dropout_key, noise, packed) -> jax.Array:
        arch = self.arch
        h = apply(noise, self.embed(tokens, dtype))
        if self.type_embed is not None:
            h = h + self.type_embed.weight[0].astype(dtype)
        if self.position_embed is not None:
            if arch.positions_skip_pads:
                positions = self._positions_skipping_padding(tokens, packed)
            h = h + self.position_embed(positions, dtype)
        h = apply(dropout_or_none(arch.embedding_dropout, dropout_key, Stream.EMBEDDING), self.embed_norm(h))
        return apply(self.projection, h)

    def _positions_skipping_padding(self, tokens: jax.Array, packed: Packed | None) -> jax.Array:
        real = tokens != self.arch.padding_idx
        numbers = jnp.cumsum(real, axis=1)
        if packed is not None:  # subtract the tokens of earlier texts in the row
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
        """Attention inputs common to all layers, and those that differ between layers."""
        arch = self.arch
        channels = arch.hidden_size // arch.num_heads
        longest = positions.shape[1] if packed is None else packed.longest[..., None, None]
        angles = rope_inputs(arch.ropes, positions, channels, longest)
        shared = AttentionInputs(channels**-0.5, valid=valid, packed=packed, **angles)
        if self.distance_embed is not None:
            table = apply(self.distance_norm, self.distance_embed.weight[...].astype(dtype))
            shared = shared._replace(distances=table)
        return shared, LayerInputs(rope_numbers(arch.ropes), window=window_inputs(arch.windows, max_tokens))

    def _attention_norms(self) -> tuple[nnx.State, jax.Array] | None:
        """For each layer, the parameters of its attention norm and whether it has one."""
        if self.attention_norm is None:
            return None
        _, state = nnx.split(self.attention_norm)
        filled = jax.tree.map(lambda leaf: jnp.pad(leaf, [(1, 0), (0, 0)]), state)
        return filled, jnp.arange(self.arch.num_layers) > 0

    def _attention_input(self, h: jax.Array, norm: nnx.State, has_norm: jax.Array) -> jax.Array:
        graph, _ = nnx.split(self.attention_norm)
        return jnp.where(has_norm, nnx.merge(graph, norm)(h), h)

    def _add_convolution(self, embedded, h, valid, dropout_key) -> jax.Array:
        spec = self.arch.convolution
        near = self.convolution(jnp.where(valid[..., None], embedded, 0))
        near = apply(dropout_or_none(spec.dropout, dropout_key, Stream.CONVOLUTION), near)
        return self.convolution_norm(h + ACTIVATIONS[spec.activation](near))


# Blocks

_ATTENTION, _ATTENTION_OUT, _MLP, _MLP_OUT, _DISTANCES = range(5)  # dropout sites within a layer


def norm_of(arch: EncoderArch, size: int | None = None) -> Norm:
    return Norm(size or arch.hidden_size, kind=arch.norm, eps=arch.norm_eps)


class EncoderBlock(nnx.Module):
    """One layer: attention and MLP. Norms apply to each residual sum or, with `arch.prenorm`, to their inputs."""

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
        """`[R, T, D]` to `[R, T, D]`. `x` is `h` after the attention norm; `key` enables dropout."""
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


# Padding masks and pooling


def valid_tokens(tokens: jax.Array, valid: jax.Array | None, lengths: jax.Array | None) -> jax.Array:
    """Tokens that may be attended to, bool `[R, T]`: `valid`, else the first `lengths` `[R]` of each row, else all."""
    if valid is not None:
        return valid
    if lengths is None:
        return jnp.ones(tokens.shape, bool)
    return jnp.arange(tokens.shape[1]) < lengths[:, None]


def pool(
    hidden: jax.Array, reads: jax.Array, pooling: str, *, valid: jax.Array | None, packed: Packed | None
) -> jax.Array:
    """One vector per read text, `[N, D]`.

    Args:
        hidden: `[R, T, D]`.
        reads: int32 `[N]`, the flat index (row * T + column) of any token of each text.
        pooling: "first" takes the text's first token, "mean" the mean over its tokens.
        valid: bool `[R, T]`, the tokens of each row's text; None for packed rows.
        packed: from `seen_both_ways`, for rows of several texts.
    """
    rows, length = reads // hidden.shape[1], hidden.shape[1]
    if packed is None:
        return _pool_rows(hidden, valid, pooling)[rows]
    first, end = (y.reshape(-1)[reads] + rows * length for y in (packed.first, packed.end))
    return _pool_texts(hidden.reshape(-1, hidden.shape[-1]), first, end, pooling)


def _pool_rows(hidden: jax.Array, valid: jax.Array, pooling: str) -> jax.Array:
    """Pool rows `[R, T, D]` of one text each: `[R, D]`."""
    if pooling == "first":
        return hidden[:, 0]
    visible = valid[..., None].astype(hidden.dtype)
    return jnp.sum(hidden * visible, axis=1) / jnp.sum(visible, axis=1)


def _pool_texts(hidden: jax.Array, first: jax.Array, end: jax.Array, pooling: str) -> jax.Array:
    """Pool flattened packed rows `[R x T, D]` over texts that span `first <= t < end`: `[N, D]`."""
    if pooling == "first":
        return jnp.take(hidden, first, axis=0, mode="clip")  # padding reads have `first` past the end
    place = jnp.arange(len(hidden))
    inside = ((place >= first[:, None]) & (place < end[:, None])).astype(hidden.dtype)
    return inside @ hidden / jnp.maximum(jnp.sum(inside, axis=1, keepdims=True), 1)
