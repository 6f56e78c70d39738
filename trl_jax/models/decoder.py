"""The decoder: embedding, a scanned stack of blocks, and a final norm. Decoder-only models are configurations of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from trl_jax.core.outputs import BLOCK, Packed, RouterSums
from trl_jax.mesh.mesh import layer_gather
from trl_jax.models.arch import BLOCKS, Arch, LayerKind, Run
from trl_jax.nn.attention import cudnn
from trl_jax.nn.attention.attention import Attention
from trl_jax.nn.attention.inputs import SAVED, AttentionInputs, LayerInputs, Striped, striped
from trl_jax.nn.attention.latent import LatentAttention
from trl_jax.nn.cache import NewEntries
from trl_jax.nn.layers import MLP, LayerEmbeddings, LayerInput, Noise, Norm
from trl_jax.nn.linear import Embedding, Linear, Stream, dropout_or_none, stream_keys
from trl_jax.nn.moe import MoE
from trl_jax.nn.recurrent import GatedDeltaNet, GatedShortConvolution, Mamba2, ParallelMixers
from trl_jax.nn.rope import Rope, rope_angles
from trl_jax.nn.text_order import previous_tokens, text_order, tokens_ahead
from trl_jax.nn.virtual_tokens import VirtualRows

# Image features


class Features(NamedTuple):
    """Image features: computed by the vision tower, read by the decoder.

    values: float32 `[S, F, D]`, the features of each shard of the batch.
    at: int32 `[R, T]`, the index of the feature that replaces each token's embedding; -1 for other tokens.
    deep: float32 `[L, S, F, D]`, features to add to the residual stream at image tokens after each of the first L
        layers, or None.
    """

    values: jax.Array
    at: jax.Array
    deep: jax.Array | None = None

    def placed(self, h: jax.Array) -> jax.Array:
        """Replace the embeddings `h` `[R, T, D]` of image tokens by their features."""
        return jnp.where((self.at >= 0)[..., None], self._by_token(self.values), h)

    def added(self, h: jax.Array, layer: jax.Array | int) -> jax.Array:
        """Add `deep[layer]`, if it exists, to the residual stream `[R, T, D]` at image tokens."""
        if self.deep is None:
            return h
        last = len(self.deep) - 1
        values = jax.lax.dynamic_index_in_dim(self.deep, jnp.minimum(layer, last), keepdims=False)
        return h + jnp.where(((self.at >= 0) & (layer <= last)[..., None])[..., None], self._by_token(values), 0)

    def _by_token(self, values: jax.Array) -> jax.Array:
        """`[S, F, D]` to `[R, T, D]`."""
        indices = self.at.reshape(len(values), -1)  # of each shard
        by_token = jax.vmap(lambda of_shard, index: of_shard[index])(values, jnp.maximum(indices, 0))
        return by_token.reshape(*self.at.shape, -1)


# The decoder


class Decoder(nnx.Module):
    """Token ids to hidden states: embedding, a scanned stack of blocks, final norm.

    If an adapter prepends virtual tokens to each text, `virtual` holds their embeddings; for prefix tuning, their ids
    start at `first_virtual` instead, and the attention layers hold their keys and values.
    """

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
        features: Features | None = None,
    ) -> jax.Array | tuple[jax.Array, RouterSums]:
        """Hidden states `[N, D]` of the tokens that are read; with `router_token_count`, also the router sums.

        Args:
            tokens, positions: int32 `[R, T]`; positions may be `[R, T, A]` if ropes have A axes.
            reads: int32 `[N]`, flat indices (row * T + column) of the tokens to return, any number per row. The final
                norm runs on these tokens only. None: all tokens, N = R x T.
            valid: bool `[R, T]`, tokens that others may attend to; None if padding is only on the right.
            packed: what each token attends to, for rows of several texts; None if each row is one text.
            lengths: int32 `[R]`, the length of each row's text, for ropes that depend on the longest text. None: the
                last read of a row is its last token. Not used for packed rows.
            dtype: compute dtype of the layers; the residual stream, norms and softmax are float32.
            remat: recompute each layer from its input in the backward pass. Otherwise, matrix products are saved and
                only the rest is recomputed, which is cheaper than saving every activation.
            dropout_key: enables dropout, at the rates of the config.
            router_key: makes SparseMixer routers sample experts, as in training.
            noise: added to the token embeddings (NEFTune).
            max_tokens: upper bound on the length of a text, None if unknown. Windows at least this long are dropped.
            router_token_count: bool or int32 `[R, T]`, the weight of each token in the router sums.
            features: replace the embeddings of image tokens; None for text-only batches.
        """
        length, stripes = tokens.shape[1], striped(1 if packed is None else BLOCK)
        ahead = self.image_ahead(features, packed)
        if stripes is not None:  # padding moves to the end: no token attends to it, and it attends to nothing
            assert reads is not None and valid is None
            tokens, positions, packed, router_token_count = jax.tree.map(
                stripes.local, (tokens, positions, packed, router_token_count)
            )
            if features is not None:
                features = features._replace(at=stripes.local(features.at, fill=-1))
        ahead = ahead if stripes is None or ahead is None else stripes.local(ahead)
        shared = AttentionInputs(self.arch.head_dim**-0.5, valid=valid, packed=packed, striped=stripes, ahead=ahead)
        longest = _longest(length, reads, lengths, packed)
        keys = stream_keys(dropout_key, Stream.LAYERS, self.arch.num_layers)
        router_keys = stream_keys(router_key, Stream.ROUTERS, self.arch.num_layers)
        h, shared, by_layer = self.begin(
            shared, tokens, positions, longest, max_tokens, dtype, dropout_key, noise, features
        )
        sums, reusable = [], {}
        for run in self.arch.runs:
            inputs_of_run = shared._replace(reused=reusable[run.kind.heads] if run.kind.reuses else None)
            graph, state = nnx.split(vars(self)[run.name])
            layer = self._layer(run, graph, inputs_of_run, router_token_count, features, dtype)
            slices = (state, *of_run((by_layer, keys, router_keys), run))
            h, (run_sums, run_new) = jax.lax.scan(checkpointed(layer, remat=remat, length=run.count), h, slices)
            if run.kind.reused:
                reusable[run.kind.heads] = last_layer(run_new)
            sums += [] if run_sums is None else [run_sums]
        hidden = self.finish(read(h, reads, length, stripes), dtype)
        if not sums:
            return hidden
        sums = sums[0] if len(sums) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *sums)
        return hidden, sums if stripes is None else stripes.summed(sums)

    def _layer(
        self,
        run: Run,
        graph: nnx.GraphDef,
        shared: AttentionInputs,
        router_token_count: jax.Array | None,
        features: Features | None,
        dtype: jnp.dtype,
    ) -> Callable:
        """The scan body of a run: `(h, slices) -> (h, (router sums, keys and values that later layers reuse))`."""

        def layer(h: jax.Array, slices: tuple) -> tuple[jax.Array, tuple]:
            state, inputs, key, router_key = slices
            block = nnx.merge(graph, whole_layer(state, f"{self.NAME}.{run.name}"))
            options = {"key": key, "router_key": router_key, "router_token_count": router_token_count}
            out = block(h, shared.of_layer(inputs), dtype=dtype, **options)
            h = out.h if inputs.number is None else features.added(out.h, inputs.number)
            return h, (out.sums, out.new if run.kind.reused else None)

        return layer

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
        features: Features | None = None,
    ) -> tuple[jax.Array, AttentionInputs, LayerInputs]:
        """The inputs of the first layer: embedded tokens `[R, T, D]`, attention inputs common to all layers (`shared`
        completed), and those that differ between layers."""
        if self.first_virtual is not None:
            shared = shared._replace(virtual=tokens - self.first_virtual)
        shared, by_layer = self._layer_inputs(shared, positions, longest, max_tokens)
        h = self._embedded(tokens, positions, dtype, shared.valid, dropout_key, noise, features)
        embedded = None
        if self.layer_embed is not None:
            text = tokens  # image tokens use the padding row of this table
            if features is not None:
                text = jnp.where(features.at >= 0, self.arch.padding_idx, tokens)
            embedded = self.layer_embed(text, h, dtype)
        deep = features is not None and features.deep is not None
        numbers = jnp.arange(self.arch.num_layers) if deep else None
        return h, shared, by_layer._replace(embedded=embedded, number=numbers)

    def image_ahead(self, features: Features | None, packed: Packed | None) -> jax.Array | None:
        """`AttentionInputs.ahead` of whole rows (before striping); None if all attention within images is causal."""
        if features is None or self.arch.image_attention is None:
            return None
        return tokens_ahead(features.at >= 0, packed)

    def angles(self, positions: jax.Array, longest: jax.Array | int) -> dict[str, jax.Array]:
        """`cos` and `sin` of `AttentionInputs`, for each kind of rope; empty if no layer uses one."""
        return rope_inputs(self.arch.ropes, positions, self.arch.rotary_dim, longest)

    def finish(self, h: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Final norm of `[N, D]`, and the projection to the embedding width that heads expect."""
        h = apply(self.norm, h)
        return h if self.project_out is None else self.project_out(h.astype(dtype)).astype(jnp.float32)

    def _embedded(self, tokens, positions, dtype, valid, dropout_key, noise, features) -> jax.Array:
        arch = self.arch
        h = self.embed(tokens, jnp.float32)
        if arch.scale_in_table:  # transformers scales inside the embedding module, so noise comes after the scale
            h = self._with_virtual(apply(noise, scaled(h, arch.embedding_scale)), tokens)
        else:
            h = scaled(self._with_virtual(apply(noise, h), tokens), arch.embedding_scale)
        if features is not None:
            h = features.placed(h)
        if self.project_in is not None:
            h = self.project_in(h.astype(dtype)).astype(jnp.float32)
        if self.position_embed is not None:
            if arch.counts_visible and valid is not None:
                positions = jnp.where(valid, jnp.cumsum(valid, axis=1) - 1, -1)
            h = h + self.position_embed(positions + arch.position_offset, jnp.float32)
        return apply(dropout_or_none(arch.embedding_dropout, dropout_key, Stream.EMBEDDING), h)

    def _with_virtual(self, embedded: jax.Array, tokens: jax.Array) -> jax.Array:
        return embedded if self.virtual is None else self.virtual(embedded, tokens)

    def _layer_inputs(
        self, shared: AttentionInputs, positions: jax.Array, longest: jax.Array | int, max_tokens: int | None
    ) -> tuple[AttentionInputs, LayerInputs]:
        """Attention inputs common to all layers (rope angles, query scale), and those that differ between layers."""
        arch = self.arch
        if shared.cos is None:
            shared = shared._replace(**self.angles(positions, longest))
        window, chunk = window_inputs(arch.windows, max_tokens), window_inputs(arch.chunks or (), max_tokens)
        if chunk is not None:
            left = 0 if shared.valid is None else jnp.argmax(shared.valid, axis=1, keepdims=True)
            shared = shared._replace(in_text=positions - left)
        scale = None if arch.attention_scales is None else jnp.asarray(arch.attention_scales, jnp.float32)
        if arch.query_growth is not None:
            contexts = jnp.floor((positions + arch.query_growth.first) / arch.query_growth.original_length)
            shared = shared._replace(query_scale=(1 + arch.query_growth.beta * jnp.log1p(contexts))[..., None, None])
        if arch.short_convolution is not None and shared.packed is not None:
            shared = shared._replace(previous=previous_tokens(shared.packed, arch.short_convolution.width - 1))
        recurrent = arch.gated_delta or arch.state_space
        if recurrent is not None and shared.packed is not None:
            shared = shared._replace(order=text_order(shared.packed, recurrent.width - 1))
        within = None if shared.ahead is None else jnp.asarray(arch.image_attention)
        return shared, LayerInputs(rope_numbers(arch.ropes), scale, window, chunk, image_attention=within)


def _longest(length: int, reads: jax.Array | None, lengths: jax.Array | None, packed: Packed | None) -> jax.Array | int:
    """The length of the longest text, in the form that `rope_inputs` expects."""
    if packed is not None:
        return packed.longest[..., None, None]
    if lengths is not None:
        return jnp.max(lengths)
    return length if reads is None else jnp.max(reads % length) + 1


# Blocks

_ATTENTION, _ATTENTION_OUT, _MLP_OUT = range(3)  # dropout sites within a layer


class BlockOutputs(NamedTuple):
    """h: residual stream `[R, T, D]`. new: the layer's new entries for a cache. sums: the router sums, or None."""

    h: jax.Array
    new: NewEntries
    sums: RouterSums | None


class Block(nnx.Module):
    """One layer: a mixer (attention or a replacement) and an MLP, in sequence or in parallel, with the norms that
    `arch.block` lists. Some kinds of layers have only a mixer or only an MLP."""

    def __init__(self, arch: Arch, kind: LayerKind):
        def norm(name: str) -> Norm | None:
            has_part = kind.mlp if name.startswith("mlp") else kind.mixer is not None
            has_norm = has_part and name in BLOCKS[arch.block]
            return Norm(arch.hidden_size, kind=arch.norm, eps=arch.norm_eps) if has_norm else None

        self.attention_norm, self.attention_out_norm = norm("attention_norm"), norm("attention_out_norm")
        self.mlp_norm, self.mlp_out_norm = norm("mlp_norm"), norm("mlp_out_norm")
        self.attention = None if kind.mixer is None else _mixer(arch, kind)
        self.mlp = _mlp(arch, kind) if kind.mlp else None
        self.beside = ParallelExperts(arch) if kind.experts and arch.experts.beside_mlp else None
        self.attention_scale, self.mlp_scale = (
            nnx.Param(jnp.ones(arch.hidden_size, jnp.float32), axes=("norm",)) if arch.layer_scale else None
            for _ in range(2)
        )
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
        """Apply the layer to `h` `[R, T, D]`.

        Mixer and MLP compute in `dtype`; the residual stream stays float32, as under torch autocast. `key` enables
        dropout and `router_key` enables sampling in SparseMixer routers. With `router_token_count` `[R, T]`, the router
        sums are returned, too, weighted by it.
        """
        sums_normed = self.arch.block == "normed_sums"
        x = (h if sums_normed else apply(self.attention_norm, h)).astype(dtype)
        attended, new = (0.0, ()) if self.attention is None else self._mix(x, inputs, key)
        if self.mlp is None:
            return BlockOutputs(h + attended, new, None)
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
        h = h + self._feed_forward(x, h, key, router_key)
        return BlockOutputs(self.mlp_norm(h) if sums_normed else self._finish_layer(h, inputs, dtype), new, sums)

    def _mix(self, x: jax.Array, inputs: AttentionInputs, key: jax.Array | None) -> tuple[jax.Array, NewEntries]:
        arch = self.arch
        dropout = dropout_or_none(arch.attention_dropout, key, _ATTENTION)
        out, new = self.attention(x, inputs, dropout)
        out = _times(apply(self.attention_out_norm, out), self.attention_scale)
        out = apply(dropout_or_none(arch.attention_out_dropout, key, _ATTENTION_OUT), out)
        return scaled(out, arch.residual_scale), new

    def _router_sums(self, x: jax.Array, h: jax.Array, router_token_count: jax.Array) -> RouterSums:
        if self.beside is None:
            return self.mlp.router_sums(x, router_token_count)
        return self.beside.router_sums(h, router_token_count, x.dtype)

    def _feed_forward(
        self, x: jax.Array, h: jax.Array, key: jax.Array | None, router_key: jax.Array | None
    ) -> jax.Array:
        arch, drawn = self.arch, router_key is not None and self.kind.experts
        out = self.mlp(x, key=router_key) if drawn else self.mlp(x)
        out = apply(self.mlp_out_norm, out if self.beside is None else self.beside(out, h))
        out = _times(out, self.mlp_scale)
        return scaled(apply(dropout_or_none(arch.mlp_out_dropout, key, _MLP_OUT), out), arch.residual_scale)

    def _finish_layer(self, h: jax.Array, inputs: AttentionInputs, dtype: jnp.dtype) -> jax.Array:
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
    maps = {"activation": arch.activation, "gated": arch.gated, "bias": arch.mlp_bias, "clipped": arch.clipped_maps}
    return MLP(arch.hidden_size, kind.mlp_size or arch.mlp_size, scales=arch.mlp_scales, **maps)


def scaled(x: jax.Array, scale: float) -> jax.Array:
    return x if scale == 1.0 else x * scale


def _times(x: jax.Array, scale: nnx.Param | None) -> jax.Array:
    return x if scale is None else x * scale[...].astype(x.dtype)


# Experts in addition to an MLP


class ParallelExperts(nnx.Module):
    """Adds normed expert outputs to a normed MLP output; the experts read the residual stream."""

    def __init__(self, arch: Arch):
        size, norm = arch.hidden_size, {"kind": arch.norm, "eps": arch.norm_eps}
        self.mlp_norm, self.norm, self.out_norm = Norm(size, **norm), Norm(size, **norm), Norm(size, **norm)
        self.moe = MoE(size, arch.experts, activation=arch.activation, eps=arch.norm_eps)

    def __call__(self, of_mlp: jax.Array, h: jax.Array) -> jax.Array:
        """Add the experts' output for the residual stream `h` to the MLP output, both `[R, T, D]`. The experts compute
        in the dtype of `of_mlp`."""
        seen, dtype = self.norm(h).astype(of_mlp.dtype), of_mlp.dtype
        return self.mlp_norm(of_mlp) + self.out_norm(self.moe(seen, h.astype(dtype)))

    def router_sums(self, h: jax.Array, router_token_count: jax.Array, dtype: jnp.dtype) -> RouterSums:
        """As `MoE.router_sums`, from the residual stream."""
        return self.moe.router_sums(h.astype(dtype), router_token_count)


# Scanning over stacked layers

_NO_WINDOW = np.iinfo(np.int32).max
_INPUT, _POLICIES = "layer_input", jax.checkpoint_policies
_SAVE_PRODUCTS = _POLICIES.save_from_both_policies(
    _POLICIES.dots_with_no_batch_dims_saveable,
    _POLICIES.save_from_both_policies(_POLICIES.save_only_these_names(SAVED), cudnn.save_policy),
)
# What is saved of a layer for the backward pass, by `remat`.
_REMAT_POLICIES = {
    False: _SAVE_PRODUCTS,
    True: _POLICIES.nothing_saveable,  # only the layer's input
    "offloaded": _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[_INPUT],
        offload_src="device", offload_dst="pinned_host",
    ),
}  # fmt: skip


def stacked(make: Callable[[], nnx.Module], count: int) -> nnx.Module:
    """Stack `count` modules into one: each parameter gets a leading axis "layers", over which `jax.lax.scan` runs."""
    graph, state = nnx.split(make())

    def stack(param: nnx.Param) -> nnx.Param:
        values = jnp.broadcast_to(param[...], (count, *param.shape))
        return param.replace(values, axes=("layers", *param.get_metadata()["axes"]))

    return nnx.merge(graph, nnx.from_flat_state([(path, stack(param)) for path, param in nnx.to_flat_state(state)]))


def in_a_stack(path: str) -> bool:
    """Whether the parameter at this path has a leading layer axis."""
    return any(name == "layers" or name.startswith("layers_from_") for name in path.split("."))


def checkpointed(layer: Callable, *, remat: bool | str, length: int) -> Callable:
    """Make a layer the checkpointed body of a scan of `length` steps.

    remat=True recomputes everything in the backward pass; False saves matrix products and the results of packed
    attention; "offloaded" recomputes everything, from layer inputs offloaded to host memory. XLA unrolls a loop of one
    step and would then eliminate the recomputation as a common subexpression, hence `prevent_cse`.
    """

    def body(h: jax.Array, slices: Any) -> tuple[jax.Array, Any]:
        return layer(checkpoint_name(h, _INPUT), slices)

    return jax.checkpoint(body, prevent_cse=length == 1, policy=_REMAT_POLICIES[remat])


def of_run(inputs: Any, run: Any) -> Any:
    """Slice per-layer inputs (arrays with a leading layer axis) to the layers of `run`, a `models.arch.Run`."""
    return jax.tree.map(lambda a: a[run.first : run.first + run.count], inputs)


def last_layer(inputs: Any) -> Any:
    """The last entry along the leading layer axis."""
    return jax.tree.map(lambda a: a[-1], inputs)


def whole_layer(state: nnx.State, stack: str) -> nnx.State:
    """Gather a layer's sharded parameters, inside the scan step that uses them.

    `stack` is the path of the stacked layers in the model.
    """
    gather = layer_gather()
    if gather is None:
        return state
    return jax.tree_util.tree_map_with_path(lambda path, leaf: gather(f"{stack}.{_dotted(path)}", leaf), state)


def _dotted(path: tuple) -> str:
    return ".".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))


def apply(part: Callable[[jax.Array], jax.Array] | None, x: jax.Array) -> jax.Array:
    """`part(x)`, or x if there is no part."""
    return x if part is None else part(x)


def read(h: jax.Array, reads: jax.Array | None, length: int, striped: Striped | None) -> jax.Array:
    """Hidden states `[N, D]` at `reads`, flat indices into rows of `length` tokens; of all tokens if it is None."""
    if striped is not None:
        return striped.read(h, *jnp.divmod(reads, length))
    h = h.reshape(-1, h.shape[-1])
    return h if reads is None else h[reads]


def narrowest_window(windows: Sequence[int | None]) -> int | None:
    """The narrowest window of all layers; None if every layer attends to everything."""
    return min((window for window in windows if window is not None), default=None)


def rope_inputs(
    ropes: Sequence[Rope | None], positions: jax.Array, channels: int, longest: jax.Array | int
) -> dict[str, jax.Array]:
    """`cos` and `sin` of `AttentionInputs`, for each kind of rope; empty if no layer uses one."""
    kinds = list(dict.fromkeys(ropes))
    if all(rope is None for rope in kinds):
        return {}
    return dict(zip(("cos", "sin"), rope_angles(positions, kinds, channels, longest), strict=True))


def rope_numbers(ropes: Sequence[Rope | None]) -> jax.Array | None:
    """The index of each layer's rope among the distinct ropes, int32 `[L]`; None if there is only one."""
    kinds = list(dict.fromkeys(ropes))
    return jnp.asarray([kinds.index(rope) for rope in ropes], jnp.int32) if len(kinds) > 1 else None


def window_inputs(windows: Sequence[int | None], max_tokens: int | None) -> jax.Array | None:
    """The window of each layer, int32 `[L]`; None if no window has an effect, because none is shorter than
    `max_tokens`, the upper bound on the length of a text (None if unknown)."""
    narrowest = narrowest_window(windows)
    if narrowest is None or (max_tokens is not None and narrowest >= max_tokens):
        return None
    return jnp.asarray([window or _NO_WINDOW for window in windows], jnp.int32)
