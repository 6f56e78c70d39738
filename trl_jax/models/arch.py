"""Dataclasses that describe the architecture of a model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from trl_jax.nn.attention.disentangled import Distances
from trl_jax.nn.layers import ClampedSwiGLU
from trl_jax.nn.moe import SparseMixer
from trl_jax.nn.rope import Rope

# Cache layout: layers of a run that have the same window share an array

_LONGEST = 8  # longest pattern of windows to look for: its layers are unrolled, so compile time grows with it


class CachePart(NamedTuple):
    """Indices of layers in the decoder, and the window they attend to (None: everything)."""

    layers: tuple[int, ...]
    window: int | None


class LayerPattern(NamedTuple):
    """A run of layers as repetitions of one pattern of windows, e.g. five local layers and a global one in gemma3. The
    last period may be incomplete.

    parts: the parts of the cache. part_of: for each layer of a period, the index of its part.
    """

    parts: tuple[CachePart, ...]
    part_of: tuple[int, ...]


def layer_pattern_of(arch: Arch, run: Run) -> LayerPattern:
    """The pattern of a run. Without a short one, each layer is a period and its cache keeps all tokens."""
    layers = range(run.first, run.first + run.count)
    windows = [_window(arch, layer) for layer in layers]
    lengths = range(1, _LONGEST + 1)
    length = next((size for size in lengths if windows == (windows[:size] * run.count)[: run.count]), None)
    if length is None:
        windows, length = [None] * run.count, 1
    kinds = list(dict.fromkeys(windows))
    members = [tuple(layer for layer, window in zip(layers, windows, strict=True) if window == kind) for kind in kinds]
    parts = tuple(CachePart(*part) for part in zip(members, kinds, strict=True))
    return LayerPattern(parts, tuple(kinds.index(window) for window in windows[:length]))


def cache_parts(arch: Arch) -> list[CachePart]:
    """All parts of a decoder's cache, in order. Layers that reuse keys and values have no part."""
    return [part for run in arch.runs if not run.kind.reuses for part in layer_pattern_of(arch, run).parts]


def _window(arch: Arch, layer: int) -> int | None:
    """The most tokens that a query of this layer attends to: its chunk length or its window; None for no limit."""
    chunk = None if arch.chunks is None else arch.chunks[layer]
    return arch.windows[layer] if chunk is None else chunk


# Decoders

# The norms of a layer. "norm" comes before, "out_norm" after attention or MLP, except where noted.
BLOCKS = {
    "pre": ("attention_norm", "mlp_norm"),
    "post": ("attention_out_norm", "mlp_out_norm"),
    "normed_sums": ("attention_norm", "mlp_norm"),  # applied to the sum with the residual stream
    "sandwich": ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"),
    "parallel": ("attention_norm",),
    "parallel_two_norms": ("attention_norm", "mlp_norm"),
}


@dataclass(frozen=True)
class Arch:
    """Architecture of a decoder. Sizes count channels, heads, layers or tokens.

    Fields that may differ between layers are tuples with one entry per layer. In `ropes`, None means a layer without
    position encoding.

    - last_norm: whether a final norm follows the stack.
    - block: a key of BLOCKS; norm, qk_norm_kind: keys of nn.layers.NORMS; activation: a key of nn.layers.ACTIVATIONS
      or "xielu".
    - qk_norm: None, "head" (one norm for all heads), "each_head" (weights per head) or "full" (over all heads at once).
    - attention_scales: multiply the scores; None is head_dim ** -0.5.
    - softcap: scores become `softcap * tanh(scores / softcap)`.
    - gated_attention: each output channel is multiplied by the sigmoid of a projection of the layer input.
    - clip_qkv: clips projected queries, keys and values.
    - sinks: each query head has a learned extra score in its softmax that carries no value.
    - chunks: queries of a layer attend within chunks of this many tokens; None for no chunks.
    - v_norm: the values of each head are normed, without weights.
    - learned_positions: rows of a learned position table, used from row `position_offset` on. With `counts_visible`,
      positions count visible tokens only.
    - scale_in_table: `embedding_scale` is applied inside the embedding module, so noise is added to scaled embeddings.
    - embedding_size: width of the embedding table and the head inputs if not `hidden_size`; linear maps convert.
    - padding_idx: row of the embedding table that is never trained.
    - kinds: the kind of each layer; None if all layers have attention and, if the arch has experts, experts.
    - mlp_scales: multiply the MLP's gate before the activation, and the MLP's output.
    - layer_scalar: each layer ends by multiplying the residual stream by a frozen scalar.
    - layer_scale: the outputs of attention and MLP are multiplied by learned vectors (LayerScale, arXiv:2103.17239).
    - rope_sections: the rotated channels of a head consist of this many equal sections, each with pairs of its own.
    - clipped_maps: inputs and outputs of the linear maps of attention and MLP are clipped to limits in the checkpoint.
    - image_attention: for each layer, whether the tokens of an image also attend to later tokens of the same image (see
      `nn.text_order.tokens_ahead`); None: in no layer.
    - tied_embeddings: the language model head uses the embedding table. Its logits are multiplied by `logit_scale` and
      then become `logit_softcap * tanh(logits / logit_softcap)`.
    - vision: the vision tower and connector that compute image features; None for text-only models.
    """

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    norm_eps: float
    ropes: tuple[Rope | None, ...]
    windows: tuple[int | None, ...]
    rotary_dim: int
    rope_interleaved: bool = False
    rope_sections: int = 1
    block: str = "pre"
    last_norm: bool = True
    norm: str = "rms"
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    clipped_maps: bool = False
    qk_norm: str | None = None
    qk_norm_kind: str = "rms"
    qk_norm_after_rope: bool = False
    v_norm: bool = False
    chunks: tuple[int | None, ...] | None = None
    image_attention: tuple[bool, ...] | None = None
    attention_scales: tuple[float, ...] | None = None
    gated_attention: bool = False
    softcap: float | None = None
    clip_qkv: float | None = None
    sinks: bool = False
    query_growth: QueryGrowth | None = None
    embedding_size: int | None = None
    embedding_scale: float = 1.0
    scale_in_table: bool = False
    residual_scale: float = 1.0
    learned_positions: int | None = None
    position_offset: int = 0
    counts_visible: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    short_convolution: ShortConvolution | None = None
    gated_delta: GatedDelta | None = None
    state_space: StateSpace | None = None
    mixer_scales: MixerScales | None = None
    mlp_scales: tuple[float, float] = (1.0, 1.0)
    layer_embedding: LayerEmbedding | None = None
    layer_scalar: bool = False
    layer_scale: bool = False
    kinds: tuple[LayerKind, ...] | None = None
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0
    attention_out_dropout: float = 0.0
    mlp_out_dropout: float = 0.0
    initializer_range: float = 0.02
    tied_embeddings: bool = False
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    padding_idx: int | None = None
    vision: VisionArch | None = None

    @property
    def runs(self) -> tuple[Run, ...]:
        """Consecutive layers of the same kind, as runs."""
        return runs_of(self.kinds or (LayerKind(experts=self.experts is not None),) * self.num_layers)

    def heads_of(self, kind: LayerKind) -> Heads:
        """The key and value heads of a layer of this kind."""
        return Heads(self.num_key_heads, self.head_dim) if kind.heads is None else kind.heads

    @property
    def head_inputs(self) -> int:
        """Width of the head inputs, and of the embedding table."""
        return self.embedding_size or self.hidden_size

    @property
    def drops_out(self) -> bool:
        """Whether any dropout rate is nonzero."""
        return any((self.attention_dropout, self.embedding_dropout, self.attention_out_dropout, self.mlp_out_dropout))

    @property
    def max_positions(self) -> int | None:
        """The longest text that the learned positions cover; None if there is no limit."""
        return None if self.learned_positions is None else self.learned_positions - self.position_offset


# Vision towers


@dataclass(frozen=True)
class Connector:
    """How outputs of a vision tower become the features that replace the embeddings of image tokens.

    - group: outputs per feature, concatenated or, if `pooled`, averaged.
    - by_channel: concatenate by channel: the first channel of all outputs of a group, then their second, and so on.
    - scale: multiplies the group. standardized: a frozen shift and scale per channel are then applied.
    - norm: a key of nn.layers.NORMS, applied to each output, or to their concatenation if `norm_grouped`; None: no
      norm.
    - merged: whether a linear map without bias reduces the concatenation to the width of one output.
    - hidden_size: width between two linear maps, with `activation` after the first; None: a single map.
    - separators: number of learned features that separate rows of an image. They are appended to the other features.
    """

    out_size: int
    group: int = 1
    pooled: bool = False
    by_channel: bool = False
    scale: float = 1.0
    standardized: bool = False
    norm: str | None = None
    norm_eps: float = 1e-6
    norm_grouped: bool = False
    merged: bool = False
    hidden_size: int | None = None
    activation: str = "gelu"
    bias: bool = True
    separators: int = 0


@dataclass(frozen=True)
class VisionArch:
    """Architecture of a vision tower and its connector.

    - layers: the transformer blocks, as an Arch without a vocabulary. The patches that each patch attends to are given
      by `Images.first` and `Images.end`.
    - kernel: channels and sizes of a patch, as in the kernel of the convolution that embeds it; patch_bias: whether it
      has a bias.
    - class_token: whether the patch at row 0 of the position table is a learned embedding.
    - position_rows: rows of the learned position table; None for no table.
    - pre_norm, post_norm: whether a norm precedes and follows the layers.
    - full_layers: for each layer, whether patches attend to their whole image rather than a window; None: all do.
    - deepstack: layers whose outputs have a connector of their own. The results are added to the residual stream after
      the first layers of the decoder (DeepStack, arXiv:2406.04334).
    """

    layers: Arch
    connector: Connector
    kernel: tuple[int, ...]
    patch_bias: bool = False
    class_token: bool = False
    position_rows: int | None = None
    pre_norm: bool = False
    post_norm: bool = False
    full_layers: tuple[bool, ...] | None = None
    deepstack: tuple[int, ...] = ()
    deepstack_connector: Connector | None = None


# Layers of a decoder


@dataclass(frozen=True)
class LayerEmbedding:
    """Each layer has its own embedding of every token, `channels` wide, from a table of `rows` rows."""

    rows: int
    channels: int


@dataclass(frozen=True)
class LayerKind:
    """What a layer consists of.

    mixer: "attention", "convolution", "delta_net", "mamba", "attention+mamba" (in parallel), or None.
    experts: whether it has experts, in place of the MLP or in addition to it.
    mlp: whether it has an MLP or experts at all.
    heads, mlp_size: None to use those of the Arch.
    no_rope: it has no position encoding and no norm of queries and keys.
    reuses: it computes no keys and values, and attends to those of the last `reused` layer with the same heads.
    """

    mixer: str | None = "attention"
    experts: bool = False
    mlp: bool = True
    heads: Heads | None = None
    mlp_size: int | None = None
    no_rope: bool = False
    reused: bool = False
    reuses: bool = False


class Run(NamedTuple):
    """`count` consecutive layers of one kind, starting at layer `first`; `name` is the attribute of their stack."""

    first: int
    count: int
    kind: LayerKind
    name: str


def runs_of(kinds: tuple[LayerKind, ...]) -> tuple[Run, ...]:
    """Group layers into runs of one kind; `kinds` has one entry per layer."""
    groups = [list(group) for _, group in groupby(range(len(kinds)), key=lambda layer: kinds[layer])]
    if len(groups) == 1:
        return (Run(0, len(kinds), kinds[0], "layers"),)
    return tuple(Run(group[0], len(group), kinds[group[0]], f"layers_from_{group[0]}") for group in groups)


# Encoders


@dataclass(frozen=True)
class HeadFacts:
    """Score head of an encoder: pooling, `dense`, activation, optional norm, `out`.

    `pooling` is "first" (the first token) or "mean" (over the text). `dense_bias` is whether `dense` has a bias.
    """

    activation: str
    pooling: str = "first"
    dense_bias: bool = True
    normed: bool = False
    dropout_before: float = 0.0
    dropout_after: float = 0.0


@dataclass(frozen=True)
class ConvolutionFacts:
    """A convolution over the embedded text, parallel to the first layer: kernel of `width` tokens, grouped channels."""

    width: int
    groups: int
    activation: str
    dropout: float = 0.0


@dataclass(frozen=True)
class EncoderArch:
    """Architecture of an encoder. Sizes count channels, heads, layers or tokens.

    - prenorm: norms come before attention and MLP (except before the first layer's attention, whose input is normed
      already) and after the stack; otherwise each residual sum is normed.
    - norm: a key of nn.layers.NORMS; activation: a key of nn.layers.ACTIVATIONS.
    - ropes, windows: one entry per layer; empty for identical layers without rope.
    - learned_positions: rows of a learned position table. With `positions_skip_pads`, padding uses row `padding_idx`,
      and tokens are numbered from the row after it.
    - type_vocab_size: rows of the token type table, 0 for no table. Only the first row is used (single texts).
    - distances: disentangled attention.
    - padding_idx: row of the embedding table that is never trained.
    - initializer_cutoff: bound on newly initialized weights of the head, in standard deviations.
    """

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    head: HeadFacts
    embedding_size: int | None = None
    prenorm: bool = False
    norm: str = "layer"
    activation: str = "gelu"
    gated: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    ropes: tuple[Rope | None, ...] = ()
    windows: tuple[int | None, ...] = ()
    learned_positions: int | None = None
    positions_skip_pads: bool = False
    type_vocab_size: int = 0
    distances: Distances | None = None
    convolution: ConvolutionFacts | None = None
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    attention_out_dropout: float = 0.0
    mlp_dropout: float = 0.0
    mlp_out_dropout: float = 0.0
    distance_dropout: float = 0.0
    initializer_range: float = 0.02
    initializer_cutoff: float | None = None
    padding_idx: int | None = None

    @property
    def num_key_heads(self) -> int:
        """Every head has its own keys (no grouped-query attention)."""
        return self.num_heads

    @property
    def drops_out(self) -> bool:
        rates = (self.embedding_dropout, self.attention_dropout, self.attention_out_dropout, self.mlp_dropout)
        rates += (self.mlp_out_dropout, self.distance_dropout, self.head.dropout_before, self.head.dropout_after)
        return any(rates)

    @property
    def takes_packed(self) -> bool:
        """Whether packed rows are supported: disentangled attention and convolutions do not support them."""
        return self.distances is None and self.convolution is None

    @property
    def max_positions(self) -> int | None:
        """The longest text that the learned positions cover; None if there is no limit."""
        if self.learned_positions is None:
            return None
        return self.learned_positions - (self.padding_idx + 1 if self.positions_skip_pads else 0)


# Mixtures of experts


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP: each token is routed to `top_k` of `count` experts of width `size`.

    - scores: how router logits become weights: "softmax" over all experts, or "sigmoid" of each.
    - renormalized: the weights of the selected experts are divided by their sum, to which `weight_floor` is added
      ("sigmoid") or which it bounds from below ("softmax"). `scale` then multiplies the weights.
    - shared_size: width of an expert applied to every token, behind a sigmoid gate if `shared_gated`; None for none.
    - float32_router: the router computes in float32 regardless of the compute dtype.
    - bias: the router and all maps of the experts have biases. gated: experts are gated MLPs.
    - swiglu: combines gate and up in place of the arch's activation.
    - latent_size: the routed experts work on this many channels, to and from which linear maps project; `latent_bias`:
      these maps and the shared expert have biases.
    - correction_bias: a frozen number per expert, added to the weights only to select experts.
    - groups, top_groups, group_best: only experts in the best `top_groups` of `groups` groups are selected; a group is
      rated by the sum of its best `group_best` experts (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
    - weights_inputs: an expert's weight multiplies its input rather than its output.
    - sparse_mixer: selects two experts and weighs them, in place of all of the above.
    - beside_mlp: the layer has an MLP and experts, whose outputs are normed and added. The experts read the residual
      stream through a norm of their own, the router through a norm without weights and a learned scale per channel;
      the weight of each expert has a learned scale, too.
    """

    count: int
    top_k: int
    size: int
    renormalized: bool
    shared_size: int | None = None
    bias: bool = False
    swiglu: ClampedSwiGLU | None = None
    shared_gated: bool = True
    scores: str = "softmax"
    float32_router: bool = False
    weight_floor: float = 0.0
    scale: float = 1.0
    correction_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    gated: bool = True
    latent_size: int | None = None
    latent_bias: bool = False
    weights_inputs: bool = False
    beside_mlp: bool = False
    sparse_mixer: SparseMixer | None = None


# Mixers: variants of attention and its replacements


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: queries come from `query_rank` channels (None: from the residual stream), keys and
    values from `key_rank`. The last `Arch.rotary_dim` channels of queries and keys are rotated; all heads share these
    channels of the keys. Values have `value_dim` channels. `norm_eps` is for the norms of the low-rank channels."""

    query_rank: int | None
    key_rank: int
    value_dim: int
    norm_eps: float


@dataclass(frozen=True)
class ShortConvolution:
    """A gated convolution in place of attention, over a token and the `width` - 1 before it."""

    width: int
    bias: bool


@dataclass(frozen=True)
class GatedDelta:
    """A gated delta net in place of attention. Query and key heads have `key_dim` channels, value heads `value_dim`;
    `value_heads` is a multiple of `key_heads`. Its convolution covers a token and the `width` - 1 before it."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int


@dataclass(frozen=True)
class StateSpace:
    """Mamba-2 in place of attention: `heads` of `head_dim` channels, each with a state of `state_dim` rows; the heads
    of a group share B and C. Its convolution covers a token and the `width` - 1 before it. `bias` is for the input
    maps, `out_bias` for the output map. Time steps are clipped to `dt_limits`. `norm` is "after_gate", "before_gate" or
    None; `scales` multiply the input projections: gate, x, B, C and time steps."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    width: int
    convolution_bias: bool
    bias: bool
    out_bias: bool
    dt_limits: tuple[float, float]
    norm: str | None = "after_gate"
    scales: tuple[float, float, float, float, float] = (1.0,) * 5


@dataclass(frozen=True)
class MixerScales:
    """Scales of the inputs and outputs of attention and Mamba-2 in parallel."""

    attention_in: float
    attention_out: float
    mamba_in: float
    mamba_out: float


@dataclass(frozen=True)
class Heads:
    """Number of key heads, and of channels per head. With `values_are_keys`, values are the keys before their norm."""

    count: int
    channels: int
    values_are_keys: bool = False


@dataclass(frozen=True)
class QueryGrowth:
    """Queries at position p are scaled by `1 + beta * log(1 + floor((p + first) / original_length))`; with `no_rope`,
    only in layers without position encoding (Nakanishi 2025, arXiv:2501.19399)."""

    beta: float
    original_length: int
    first: int = 0
    no_rope: bool = False
