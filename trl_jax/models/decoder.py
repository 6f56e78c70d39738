"""The one configurable decoder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.core.packed import BLOCK, Packed
from trl_jax.core.router_sums import RouterSums
from trl_jax.models.arch import Arch
from trl_jax.models.block import EMBEDDING, Block, scaled
from trl_jax.models.stack import (
    apply,
    checkpointed,
    last_layer,
    of_run,
    read,
    rope_inputs,
    rope_numbers,
    stacked,
    whole_layer,
    window_inputs,
)
from trl_jax.nn.attention.inputs import AttentionInputs, LayerInputs
from trl_jax.nn.attention.striped import striped
from trl_jax.nn.dropout import dropout_or_none
from trl_jax.nn.layer_embedding import LayerEmbeddings
from trl_jax.nn.linear import Embedding, Linear
from trl_jax.nn.noise import Noise
from trl_jax.nn.norm import Norm
from trl_jax.nn.recurrent.text_order import previous_tokens, text_order
from trl_jax.nn.virtual_tokens import VirtualRows


def _longest(
    length: int, reads: jax.Array | None, lengths: jax.Array | None, packed: Packed | None
) -> jax.Array | int:
    """The length of the longest text, as ropes take it."""
    if packed is not None:
        return packed.longest[..., None, None]
    if lengths is not None:
        return jnp.max(lengths)
    return length if reads is None else jnp.max(reads % length) + 1


class Decoder(nnx.Module):
    """Token ids to hidden states: embedding, a scanned stack of blocks, a last norm. `virtual` has the embeddings of
    virtual tokens, where an adapter puts some before each text; where it has keys and values of them, their ids begin
    with `first_virtual`."""

    NAME = "decoder"
    virtual: VirtualRows | None

    def __init__(self, arch: Arch):
        self.arch = arch
        table = {"padding_idx": arch.padding_idx, "axes": ("vocab", "embed")}
        inner, outer = arch.hidden_size, arch.head_inputs
        self.embed = Embedding(arch.vocab_size, outer, **table)
        self.virtual, self.first_virtual = nnx.data(None), None
        learned = arch.learned_positions
        self.position_embed = None if learned is None else Embedding(learned, inner)
        self.project_in = None if inner == outer else Linear(outer, inner, axes=("", "embed"))
        self.project_out = None if inner == outer else Linear(inner, outer, axes=("", "embed"))
        self.layer_embed = None if arch.layer_embedding is None else LayerEmbeddings(arch)
        for run in arch.runs:
            setattr(self, run.name, stacked(lambda run=run: Block(arch, run.kind), run.count))
        self.norm = Norm(inner, kind=arch.norm, eps=arch.norm_eps) if arch.last_norm else None

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
        router_key: jax.Array | None = None,
        noise: Noise | None = None,
        max_tokens: int | None = None,
        router_token_count: jax.Array | None = None,
    ) -> jax.Array | tuple[jax.Array, RouterSums]:
        """Hidden states `[N, D]` of the tokens that are read; with `router_token_count` the routers' sums, too.

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
            router_key: has routers draw experts, where sparse mixers do so in training.
            noise: what is added to the embeddings of tokens.
            max_tokens: no text has more tokens; None where nobody knows. Windows as long are left out.
            router_token_count: bool or int32 `[R, T]`, the tokens that the routers of experts are summed over, and how
                often each.
        """
        length, stripes = tokens.shape[1], striped(1 if packed is None else BLOCK)
        if stripes is not None:  # tokens that fill them up come after all that is seen, and see nothing themselves
            assert reads is not None and valid is None
            tokens, positions, packed, router_token_count = jax.tree.map(
                stripes.local, (tokens, positions, packed, router_token_count)
            )
        shared = AttentionInputs(self.arch.head_dim**-0.5, valid=valid, packed=packed, striped=stripes)
        longest = _longest(length, reads, lengths, packed)
        keys, router_keys = (
            None if key is None else jax.random.split(key, self.arch.num_layers) for key in (dropout_key, router_key)
        )
        h, shared, by_layer = self.begin(shared, tokens, positions, longest, max_tokens, dtype, dropout_key, noise)
        sums, made = [], {}
        for run in self.arch.runs:
            graph, state = nnx.split(vars(self)[run.name])
            reused = made[run.kind.heads] if run.kind.reuses else None

            def layer(h, slices, graph=graph, run=run, reused=reused):
                state, inputs, key, router_key = slices
                block = nnx.merge(graph, whole_layer(state, f"{self.NAME}.{run.name}"))
                own = shared.of_layer(inputs)._replace(reused=reused)
                options = {"key": key, "router_key": router_key, "router_token_count": router_token_count}
                out = block(h, own, dtype=dtype, **options)
                return out.h, (out.sums, out.kept if run.kind.reused else None)

            slices = (state, *of_run((by_layer, keys, router_keys), run))
            h, (run_sums, run_kept) = jax.lax.scan(checkpointed(layer, remat=remat, turns=run.count), h, slices)
            if run.kind.reused:
                made[run.kind.heads] = last_layer(run_kept)
            sums += [] if run_sums is None else [run_sums]
        hidden = self.finish(read(h, reads, length, stripes), dtype)
        if not sums:
            return hidden
        sums = sums[0] if len(sums) == 1 else jax.tree.map(lambda *each: jnp.concatenate(each), *sums)
        return hidden, sums if stripes is None else stripes.summed(sums)

    def begin(
        self,
        shared: AttentionInputs,
        tokens: jax.Array,
        positions: jax.Array,
        longest: jax.Array | int,
        max_tokens: int | None,
        dtype: jnp.dtype,
        dropout_key: jax.Array | None = None,
        noise: Noise | None = None,
    ) -> tuple[jax.Array, AttentionInputs, LayerInputs]:
        """Make what the first layer gets: the embedded tokens `[R, T, D]`, and the inputs of attention, those of all
        layers added to `shared`, and those that differ."""
        if self.first_virtual is not None:
            shared = shared._replace(virtual=tokens - self.first_virtual)
        shared, by_layer = self._layer_inputs(shared, positions, longest, max_tokens)
        h = self._embedded(tokens, positions, dtype, shared.valid, dropout_key, noise)
        embedded = None if self.layer_embed is None else self.layer_embed(tokens, h, dtype)
        return h, shared, by_layer._replace(embedded=embedded)

    def angles(self, positions: jax.Array, longest: jax.Array | int) -> dict[str, jax.Array]:
        """The `cos` and `sin` of `AttentionInputs` for all kinds of rope; none where no layer turns."""
        return rope_inputs(self.arch.ropes, positions, self.arch.rotary_dim, longest)

    def finish(self, h: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Norm the stack's results `[N, D]`, and map them to the channels that a head reads."""
        h = apply(self.norm, h)
        return h if self.project_out is None else self.project_out(h.astype(dtype)).astype(jnp.float32)

    def _embedded(self, tokens, positions, dtype, valid, dropout_key, noise) -> jax.Array:
        arch = self.arch
        h = self.embed(tokens, jnp.float32)
        if arch.scale_in_table:  # transformers' embedding gives scaled vectors; elsewhere the model scales them
            h = self._with_virtual(apply(noise, scaled(h, arch.embedding_scale)), tokens)
        else:
            h = scaled(self._with_virtual(apply(noise, h), tokens), arch.embedding_scale)
        if self.project_in is not None:
            h = self.project_in(h.astype(dtype)).astype(jnp.float32)
        if self.position_embed is not None:
            if arch.counts_visible and valid is not None:
                positions = jnp.where(valid, jnp.cumsum(valid, axis=1) - 1, -1)
            h = h + self.position_embed(positions + arch.position_offset, jnp.float32)
        return apply(dropout_or_none(arch.embedding_dropout, dropout_key, EMBEDDING), h)

    def _with_virtual(self, embedded: jax.Array, tokens: jax.Array) -> jax.Array:
        return embedded if self.virtual is None else self.virtual(embedded, tokens)

    def _layer_inputs(
        self, shared: AttentionInputs, positions: jax.Array, longest: jax.Array | int, max_tokens: int | None
    ) -> tuple[AttentionInputs, LayerInputs]:
        """Those of all layers with ropes and the scale of queries, and those that differ."""
        arch = self.arch
        if shared.cos is None:
            shared = shared._replace(**self.angles(positions, longest))
        window, chunk = window_inputs(arch.windows, max_tokens), window_inputs(arch.chunks or (), max_tokens)
        if chunk is not None:
            left = 0 if shared.valid is None else jnp.argmax(shared.valid, axis=1, keepdims=True)
            shared = shared._replace(in_text=positions - left)
        scale = None if arch.attention_scales is None else jnp.asarray(arch.attention_scales, jnp.float32)
        if arch.query_growth is not None:
            turns = jnp.floor((positions + arch.query_growth.first) / arch.query_growth.original_length)
            shared = shared._replace(query_scale=(1 + arch.query_growth.beta * jnp.log1p(turns))[..., None, None])
        if arch.short_convolution is not None and shared.packed is not None:
            shared = shared._replace(previous=previous_tokens(shared.packed, arch.short_convolution.width - 1))
        recurrent = arch.gated_delta or arch.state_space
        if recurrent is not None and shared.packed is not None:
            shared = shared._replace(order=text_order(shared.packed, recurrent.width - 1))
        return shared, LayerInputs(rope_numbers(arch.ropes), scale, window, chunk)
