"""Arch: the facts that describe a model's architecture."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from trl_jax.nn.attention.disentangled import Distances
from trl_jax.nn.layers import ClampedSwiGLU
from trl_jax.nn.moe import SparseMixer
from trl_jax.nn.rope import Rope

# ----------------------------------------------------------------------------------------------------
# Which layers of a decoder have their part of a cache in one array: those of a run that see as many tokens.


_LONGEST = 8  # layers of a turn, which are compiled one by one


class CachePart(NamedTuple):
    """The numbers of layers in the decoder, and how many tokens they see; None: all."""

    layers: tuple[int, ...]
    window: int | None


class Turns(NamedTuple):
    """A run of layers as turns in which their windows repeat: five narrow ones and a wide one in gemma3. The last turn
    may have fewer layers.

    parts: of the cache. pattern: the number of the part of each layer of a turn.
    """

    parts: tuple[CachePart, ...]
    pattern: tuple[int, ...]


def turns_of(arch: Arch, run: Run) -> Turns:
    """The turns of a run; without a pattern of few layers each turn is one of them, and all tokens are kept."""
    layers = range(run.first, run.first + run.count)
    windows = [_window(arch, layer) for layer in layers]
    lengths = range(1, _LONGEST + 1)
    length = next((each for each in lengths if windows == (windows[:each] * run.count)[: run.count]), None)
    if length is None:
        windows, length = [None] * run.count, 1
    kinds = list(dict.fromkeys(windows))
    own = [tuple(layer for layer, each in zip(layers, windows, strict=True) if each == kind) for kind in kinds]
    parts = tuple(CachePart(*each) for each in zip(own, kinds, strict=True))
    return Turns(parts, tuple(kinds.index(each) for each in windows[:length]))


def cache_parts(arch: Arch) -> list[CachePart]:
    """All parts of a decoder's cache, in their order. Layers that reuse keys and values are in none."""
    return [part for run in arch.runs if not run.kind.reuses for part in turns_of(arch, run).parts]


def _window(arch: Arch, layer: int) -> int | None:
    """How many tokens a layer sees at most; a chunk as long has no more."""
    chunk = None if arch.chunks is None else arch.chunks[layer]
    return arch.windows[layer] if chunk is None else chunk


# ----------------------------------------------------------------------------------------------------
# The facts that tell one decoder from another.


# Which norms a layer has: before and after attention, before and after the MLP, but where something else is said.
BLOCKS = {
    "pre": ("attention_norm", "mlp_norm"),
    "post": ("attention_out_norm", "mlp_out_norm"),
    "normed_sums": ("attention_norm", "mlp_norm"),  # what was added up is normed, residual stream and all
    "sandwich": ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"),
    "parallel": ("attention_norm",),
    "parallel_two_norms": ("attention_norm", "mlp_norm"),
}


@dataclass(frozen=True)
class Arch:
    """A decoder's facts. Sizes are counts of channels, heads, layers or tokens.

    A fact that may differ from layer to layer is a tuple with one entry a layer; in `ropes`, None is a layer that does
    not know positions. `last_norm`: a norm closes the stack. `block` is a key of BLOCKS, `norm` and `qk_norm_kind` of
    nn.norm.NORMS, `activation` of nn.mlp.ACTIVATIONS or "xielu". `qk_norm` is None, "head" (one norm for all heads),
    "each_head" (weights for each of them) or "full" (over all heads at once). `attention_scales` multiply the scores;
    None is head_dim ** -0.5. `softcap` bounds the scores by `softcap * tanh(scores / softcap)`; with `gated_attention`,
    each channel of the result is multiplied by the sigmoid of one of the token's own; `clip_qkv` bounds projected
    queries, keys and values. With `sinks`, each query head has a learned score more in the sum of its softmax, which
    brings no value. `chunks`: a layer's queries see the keys of their own chunk of a text, this many tokens long; None
    without any. With `v_norm`, the values of each head are normed, without weights. `learned_positions` counts the rows
    of a table of positions, read from row `position_offset` on; with `counts_visible`, positions count the visible
    tokens only. With `scale_in_table`, `embedding_scale` belongs to the table of tokens, so that noise comes after it.
    `embedding_size`: the width of that table and of what heads read, if it is not `hidden_size`; linear maps lead from
    one to the other. `padding_idx` is the row of the embedding that never trains.

    `kinds` is None where all layers attend, and have experts if there are any. `mlp_scales` multiply what the MLP's
    gate is computed of, and what the MLP gives. With `layer_scalar`, each layer ends by multiplying the residual stream
    by a number of its own, which never trains.

    A language model's head computes with the table of tokens where `tied_embeddings`; its logits are multiplied by
    `logit_scale`, and then bounded by `logit_softcap * tanh(logits / logit_softcap)`.
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
    block: str = "pre"
    last_norm: bool = True
    norm: str = "rms"
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None
    qk_norm_kind: str = "rms"
    qk_norm_after_rope: bool = False
    v_norm: bool = False
    chunks: tuple[int | None, ...] | None = None
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

    @property
    def runs(self) -> tuple[Run, ...]:
        """The layers in runs of one kind each."""
        return runs_of(self.kinds or (LayerKind(experts=self.experts is not None),) * self.num_layers)

    def heads_of(self, kind: LayerKind) -> Heads:
        """The heads of a layer."""
        return Heads(self.num_key_heads, self.head_dim) if kind.heads is None else kind.heads

    @property
    def head_inputs(self) -> int:
        """Channels of what a head reads, and of the table of tokens."""
        return self.embedding_size or self.hidden_size

    @property
    def drops_out(self) -> bool:
        """Whether dropout, turned on, would change anything."""
        return any((self.attention_dropout, self.embedding_dropout, self.attention_out_dropout, self.mlp_out_dropout))

    @property
    def max_positions(self) -> int | None:
        """The length of the longest text that has positions; None where any has."""
        return None if self.learned_positions is None else self.learned_positions - self.position_offset


# ----------------------------------------------------------------------------------------------------
# The facts that tell the layers of one decoder from one another.


@dataclass(frozen=True)
class LayerEmbedding:
    """Each layer has its own embedding of every token, `channels` wide, from a table with this many `rows`."""

    rows: int
    channels: int


@dataclass(frozen=True)
class LayerKind:
    """The parameters that a layer has: `mixer` is "attention", "convolution", "delta_net", "mamba", "attention+mamba"
    for both side by side, or None where it has none; `experts`: whether these are in the place of the MLP, or beside
    it; `mlp`: whether it has either of them. `heads` and `mlp_size` are None where they are those of the Arch.

    A layer that is `unplaced` knows no positions, and norms no queries and keys. One that `reuses` makes no keys and
    values: it attends to those of the last layer that is `reused` and has the same heads.
    """

    mixer: str | None = "attention"
    experts: bool = False
    mlp: bool = True
    heads: Heads | None = None
    mlp_size: int | None = None
    unplaced: bool = False
    reused: bool = False
    reuses: bool = False


class Run(NamedTuple):
    """`count` layers of one kind, one after another, from layer `first` on; `name` is that of their stack."""

    first: int
    count: int
    kind: LayerKind
    name: str


def runs_of(kinds: tuple[LayerKind, ...]) -> tuple[Run, ...]:
    """The layers in runs of one kind each; `kinds` has an entry a layer."""
    groups = [list(group) for _, group in groupby(range(len(kinds)), key=lambda layer: kinds[layer])]
    if len(groups) == 1:
        return (Run(0, len(kinds), kinds[0], "layers"),)
    return tuple(Run(group[0], len(group), kinds[group[0]], f"layers_from_{group[0]}") for group in groups)


# ----------------------------------------------------------------------------------------------------
# The facts that tell one encoder from another.


@dataclass(frozen=True)
class HeadFacts:
    """How hidden states become a score: pooled, `dense`, activation, maybe a norm, `out`.

    `pooling` is "first" (the first token) or "mean" (of the text). `dense_bias` is that of `dense`.
    """

    activation: str
    pooling: str = "first"
    dense_bias: bool = True
    normed: bool = False
    dropout_before: float = 0.0
    dropout_after: float = 0.0


@dataclass(frozen=True)
class ConvolutionFacts:
    """A convolution over the embedded text, parallel to the first layer: `width` tokens, in groups of channels."""

    width: int
    groups: int
    activation: str
    dropout: float = 0.0


@dataclass(frozen=True)
class EncoderArch:
    """An encoder's facts. Sizes are counts of channels, heads, layers or tokens.

    `prenorm`: a layer norms what attention and MLP read, the first layer's attention reads the embedding itself, and
    a last norm closes the stack; otherwise it norms each sum. `norm` is a key of nn.norm.NORMS, `activation` of
    nn.mlp.ACTIVATIONS. `ropes` and `windows` have an entry a layer; both are empty where layers are all alike and do
    not turn. `learned_positions` counts the rows of a table of positions; with `positions_skip_pads` a pad has the
    row `padding_idx` of it, and tokens count on from there. `type_vocab_size` counts the rows of a table of which a
    single text has the first; 0 is none. `distances` stands for disentangled attention. `padding_idx` is the row of
    the embedding that never trains. `initializer_cutoff` bounds new weights of the head, in standard deviations.
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
        """Each head has keys of its own."""
        return self.num_heads

    @property
    def drops_out(self) -> bool:
        rates = (self.embedding_dropout, self.attention_dropout, self.attention_out_dropout, self.mlp_dropout)
        rates += (self.mlp_out_dropout, self.distance_dropout, self.head.dropout_before, self.head.dropout_after)
        return any(rates)

    @property
    def takes_packed(self) -> bool:
        """Whether texts may lie end to end: what goes by distances, or reads neighbours, has not been taught to."""
        return self.distances is None and self.convolution is None

    @property
    def max_positions(self) -> int | None:
        """The length of the longest text that has positions; None where any has."""
        if self.learned_positions is None:
            return None
        return self.learned_positions - (self.padding_idx + 1 if self.positions_skip_pads else 0)


# ----------------------------------------------------------------------------------------------------
# The facts of a mixture of experts.


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP: `top_k` of `count` experts, each `size` wide, see every token.

    `scores` turns the router's logits into weights: "softmax" over all experts, or "sigmoid" of each.
    `renormalised`: the weights of the selected ones are made to add up to 1, but for what `weight_floor` adds to their
    sum ("sigmoid") or holds it up to ("softmax"); `scale` then multiplies them. `shared_size`: the width of an expert
    that sees every token, behind a sigmoid gate where `shared_gated`; None without it. `float32_router`: it computes in
    float32, whatever other layers do. `bias`: the router and every map of an expert have one. `gated`: experts are as
    gated MLPs are. `swiglu`: joins gate and up in the place of the arch's activation; None leaves it to that. With
    `latent_size`, experts that do not see every token compute in so many channels, which a linear map makes of the
    token's and another brings back; `latent_bias`: these and the expert that sees every token have biases.

    `correction_bias`: a number of each expert that is added to its weight for the selection alone, and never trained.
    Of `groups` of experts, the best `top_groups` are selected from; a group is as good as its best `group_best` experts
    together (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). With `weights_inputs`, an expert's weight multiplies what
    it sees, not what it gives. `sparse_mixer` selects two experts and weighs them in the place of all this.

    `beside_mlp`: a layer has both, and either's result is normed before they are added; the experts see the residual
    stream through a norm of their own, and the router through one without weights, with a learned scale for each of
    its channels. The weight of each expert then has a learned scale, too.
    """

    count: int
    top_k: int
    size: int
    renormalised: bool
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


# ----------------------------------------------------------------------------------------------------
# The facts of what stands in the place of attention, or changes it: the parts of a layer that mix tokens.


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: queries, and keys and values, come from a few channels, `query_rank` (None: from the
    residual stream) and `key_rank`. Of a query's and a key's channels the last `Arch.rotary_dim` know positions, and
    those of keys are shared by all heads. A value has `value_dim` channels. `norm_eps` is of the norms of the few
    channels."""

    query_rank: int | None
    key_rank: int
    value_dim: int
    norm_eps: float


@dataclass(frozen=True)
class ShortConvolution:
    """A gated convolution in place of attention: it sees a token and the `width` - 1 before it."""

    width: int
    bias: bool


@dataclass(frozen=True)
class GatedDelta:
    """A gated delta net in place of attention: heads of queries and keys with `key_dim` channels, and of values with
    `value_dim`, a multiple as many. Its convolution sees a token and the `width` - 1 before it."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int


@dataclass(frozen=True)
class StateSpace:
    """Mamba-2 in place of attention: `heads` of `head_dim` channels, each with a state of `state_dim` rows; those of
    one of `groups` write and read with the same. Its convolution sees a token and the `width` - 1 before it; `bias` is
    of its linear maps, `out_bias` of the last. Steps of time are within `dt_limits`. `norm` is "after_gate" or
    "before_gate", or None without one; `scales` multiply what the first map gives: gate, x, B, C and steps."""

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
    """Factors of the inputs and the results of attention and of Mamba-2 side by side."""

    attention_in: float
    attention_out: float
    mamba_in: float
    mamba_out: float


@dataclass(frozen=True)
class Heads:
    """The key heads of some layers, and the channels of each head. With `values_are_keys`, values are what keys are
    before their norm."""

    count: int
    channels: int
    values_are_keys: bool = False


@dataclass(frozen=True)
class QueryGrowth:
    """Queries at position p are scaled by `1 + beta * log(1 + floor(p / original_length))`, p counted from `first` on;
    with `unplaced`, those of layers that know no positions alone (Nakanishi 2025, arXiv:2501.19399)."""

    beta: float
    original_length: int
    first: int = 0
    unplaced: bool = False
