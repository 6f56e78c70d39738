"""The facts that tell one decoder from another."""

from __future__ import annotations

from dataclasses import dataclass

from trl_jax.models.arch.experts import Experts
from trl_jax.models.arch.layers import LayerEmbedding, LayerKind, Run, runs_of
from trl_jax.models.arch.mixers import (
    GatedDelta,
    Heads,
    Latent,
    MixerScales,
    QueryGrowth,
    ShortConvolution,
    StateSpace,
)
from trl_jax.nn.rope import Rope

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
