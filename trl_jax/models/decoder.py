"""The one configurable decoder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.core.packed import BLOCK, Packed
from trl_jax.models.arch import BLOCKS, Arch
from trl_jax.models.stack import apply, checkpointed, seen_by_layer, seen_by_layers, stacked, whole_layer
from trl_jax.nn.attention import Attention
from trl_jax.nn.dropout import dropout_or_none
from trl_jax.nn.linear import Embedding
from trl_jax.nn.mlp import MLP
from trl_jax.nn.moe import MoE
from trl_jax.nn.noise import Noise
from trl_jax.nn.norm import Norm
from trl_jax.nn.striped import Striped, striped

_EMBEDDING, _ATTENTION, _ATTENTION_OUT, _MLP_OUT = range(4)  # places of dropout


class Block(nnx.Module):
    """One layer: attention and MLP with the norms that `arch.block` names, one after the other or side by side."""

    def __init__(self, arch: Arch):
        def norm(name: str) -> Norm | None:
            there = name in BLOCKS[arch.block]
            return Norm(arch.hidden_size, kind=arch.norm, eps=arch.norm_eps) if there else None

        self.attention_norm, self.attention_out_norm = norm("attention_norm"), norm("attention_out_norm")
        self.mlp_norm, self.mlp_out_norm = norm("mlp_norm"), norm("mlp_out_norm")
        self.attention = Attention(arch)
        self.mlp = _mlp(arch)
        self.arch = arch

    def __call__(self, h: jax.Array, *, dtype: jnp.dtype, key: jax.Array | None = None, **seen) -> jax.Array:
        """`[R, T, D]` to the same; `key` turns dropout on, `seen` is what `Attention.__call__` takes.

        What is added to the residual stream is computed in `dtype`, the stream itself stays float32, as under torch's
        autocast.
        """
        x = apply(self.attention_norm, h).astype(dtype)
        attended = self._attend(x, key, seen)
        if self.arch.block == "parallel":
            return h + attended + self._feed(x, key)
        if self.arch.block == "parallel_two_norms":
            return h + attended + self._feed(self.mlp_norm(h).astype(dtype), key)
        h = h + attended
        return h + self._feed(apply(self.mlp_norm, h).astype(dtype), key)

    def _attend(self, x: jax.Array, key: jax.Array | None, seen: dict) -> jax.Array:
        arch = self.arch
        dropout = dropout_or_none(arch.attention_dropout, key, _ATTENTION)
        out = apply(self.attention_out_norm, self.attention(x, dropout=dropout, **seen))
        return _scaled(
            apply(dropout_or_none(arch.attention_out_dropout, key, _ATTENTION_OUT), out), arch.residual_scale
        )

    def _feed(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        arch = self.arch
        out = apply(self.mlp_out_norm, self.mlp(x))
        return _scaled(apply(dropout_or_none(arch.mlp_out_dropout, key, _MLP_OUT), out), arch.residual_scale)


def _own(share: Striped, tokens: jax.Array, positions: jax.Array, packed: Packed | None) -> tuple:
    """What this device has of the rows; what fills them up comes after all that is seen, and sees nothing itself."""
    if packed is not None:
        packed = jax.tree.map(share.own, packed)
    return share.own(tokens), share.own(positions), packed


def _read(h: jax.Array, reads: jax.Array | None, length: int, striped: Striped | None) -> jax.Array:
    """Hidden states `[N, D]` at the flat places `reads` of rows of `length` tokens; of every token without any."""
    if striped is not None:
        return striped.read(h, *jnp.divmod(reads, length))
    h = h.reshape(-1, h.shape[-1])
    return h if reads is None else h[reads]


def _mlp(arch: Arch) -> MLP | MoE:
    if arch.experts is not None:
        return MoE(arch.hidden_size, arch.experts, activation=arch.activation)
    return MLP(arch.hidden_size, arch.mlp_size, activation=arch.activation, gated=arch.gated, bias=arch.mlp_bias)


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    return x if scale == 1.0 else x * scale


class Decoder(nnx.Module):
    """Token ids to hidden states: embedding, a scanned stack of blocks, a last norm."""

    def __init__(self, arch: Arch):
        self.arch = arch
        self.embed = Embedding(arch.vocab_size, arch.hidden_size, padding_idx=arch.padding_idx)
        learned = arch.learned_positions
        self.position_embed = None if learned is None else Embedding(learned, arch.hidden_size)
        self.layers = stacked(lambda: Block(arch), arch.num_layers)
        self.norm = Norm(arch.hidden_size, kind=arch.norm, eps=arch.norm_eps)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        reads: jax.Array | None = None,
        *,
        valid: jax.Array | None = None,
        packed: Packed | None = None,
        lengths: jax.Array | None = None,
        dtype: jnp.dtype = jnp.float32,
        remat: bool = False,
        dropout_key: jax.Array | None = None,
        noise: Noise | None = None,
        max_tokens: int | None = None,
    ) -> jax.Array:
        """Hidden states `[N, D]` of the tokens that are read.

        Args:
            tokens, positions: int32 `[R, T]`.
            reads: int32 `[N]`, places of the tokens that are wanted, row * T + place in the row, any number of a row;
                the last norm runs on those alone. None: all, N = R x T.
            valid: bool `[R, T]`, tokens that others may see; None where pads only stand to the right.
            packed: what tokens see of their row where texts lie in it end to end; None where each row is a text.
            lengths: int32 `[R]`, the tokens of each row's text, for ropes that ask for the longest; None means that the
                last token that is read ends it. Packed rows know their own.
            dtype: what layers compute in; the residual stream, norms and softmax are float32.
            remat: the backward pass recomputes each layer from its input. Otherwise it keeps what the linear maps gave
                and recomputes the rest: to store every activation costs more than it saves.
            dropout_key: turns dropout on, at the rates in the config.
            noise: what is added to the embeddings of tokens.
            max_tokens: no text has more tokens; None where nobody knows. Windows as long are left out.
        """
        length, share = tokens.shape[1], striped(1 if packed is None else BLOCK)
        if share is not None:
            assert reads is not None and valid is None
            tokens, positions, packed = _own(share, tokens, positions, packed)
        if packed is not None:
            longest = packed.longest[..., None, None]
        elif lengths is not None:
            longest = jnp.max(lengths)
        else:
            longest = length if reads is None else jnp.max(reads % length) + 1
        shared, by_layer = self._positions(positions, longest, max_tokens)
        if packed is not None:
            shared["packed"] = packed
        graph, state = nnx.split(self.layers)

        def layer(h, slices):
            state, own, key = slices
            seen = {"scale": self.arch.head_dim**-0.5, "cos": None, "sin": None} | seen_by_layer(shared, own)
            block = nnx.merge(graph, whole_layer(state))
            return block(h, dtype=dtype, valid=valid, key=key, striped=share, **seen), None

        h = self._embedded(tokens, positions, valid, dropout_key, noise)
        keys = None if dropout_key is None else jax.random.split(dropout_key, self.arch.num_layers)
        h, _ = jax.lax.scan(checkpointed(layer, remat=remat), h, (state, by_layer, keys))
        return self.norm(_read(h, reads, length, share))

    def _embedded(self, tokens, positions, valid, dropout_key, noise) -> jax.Array:
        arch = self.arch
        h = self.embed(tokens, jnp.float32)
        if arch.scale_in_table:  # transformers' embedding gives scaled vectors; elsewhere the model scales them
            h = apply(noise, _scaled(h, arch.embedding_scale))
        else:
            h = _scaled(apply(noise, h), arch.embedding_scale)
        if self.position_embed is not None:
            if arch.counts_visible and valid is not None:
                positions = jnp.where(valid, jnp.cumsum(valid, axis=1) - 1, -1)
            h = h + self.position_embed(positions + arch.position_offset, jnp.float32)
        return apply(dropout_or_none(arch.embedding_dropout, dropout_key, _EMBEDDING), h)

    def _positions(self, positions: jax.Array, longest: jax.Array | int, max_tokens: int | None) -> tuple[dict, dict]:
        """What all layers share, and what `[L]` arrays say of each: its window, its rope's number, its scale."""
        arch = self.arch
        shared, by_layer = seen_by_layers(arch.ropes, arch.windows, positions, arch.rotary_dim, longest, max_tokens)
        if arch.attention_scales is not None:
            by_layer["scale"] = jnp.asarray(arch.attention_scales, jnp.float32)
        if arch.query_growth is not None:
            turns = jnp.floor(positions / arch.query_growth.original_length)
            shared["growth"] = (1 + arch.query_growth.beta * jnp.log1p(turns))[..., None, None]
        return shared, by_layer
