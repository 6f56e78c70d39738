"""The facts that tell one decoder from another."""

from __future__ import annotations

from dataclasses import dataclass

from trl_jax.nn.mlp import ClampedSwiGLU
from trl_jax.nn.rope import Rope

# Which norms a layer has: before and after attention, before and after the MLP.
BLOCKS = {
    "pre": ("attention_norm", "mlp_norm"),
    "post": ("attention_out_norm", "mlp_out_norm"),
    "sandwich": ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"),
    "parallel": ("attention_norm",),
    "parallel_two_norms": ("attention_norm", "mlp_norm"),
}


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP: `top_k` of `count` experts, each `size` wide, see every token.

    `renormalised`: the weights of the selected ones are made to add up to 1. `shared_size`: the width of an expert that
    sees every token behind a sigmoid gate; None without it. `bias`: the router and every map of an expert have one.
    `swiglu`: joins gate and up in the place of the arch's activation; None leaves it to that.
    """

    count: int
    top_k: int
    size: int
    renormalised: bool
    shared_size: int | None = None
    bias: bool = False
    swiglu: ClampedSwiGLU | None = None


@dataclass(frozen=True)
class QueryGrowth:
    """Queries at position p are scaled by `1 + beta * log(1 + floor(p / original_length))`."""

    beta: float
    original_length: int


@dataclass(frozen=True)
class Arch:
    """A decoder's facts. Sizes are counts of channels, heads, layers or tokens.

    A fact that may differ from layer to layer is a tuple with one entry a layer; in `ropes`, None is a layer that does
    not know positions. `block` is a key of BLOCKS, `norm` and `qk_norm_kind` of nn.norm.NORMS, `activation` of
    nn.mlp.ACTIVATIONS. `qk_norm` is None, "head" (one norm for all heads), "each_head" (weights for each of them) or
    "full" (over all heads at once). `attention_scales` multiply the scores; None is head_dim ** -0.5. `softcap` bounds
    the scores by `softcap * tanh(scores / softcap)`; `clip_qkv` bounds projected queries, keys and values.
    With `sinks`, each query head has a learned score more in the sum of its softmax, which brings no value.
    `learned_positions` counts the rows of a table of positions, read from row `position_offset` on; with
    `counts_visible`, positions count the visible tokens only. With `scale_in_table`, `embedding_scale` belongs to
    the table of tokens, so that noise comes after it. `padding_idx` is the row of the embedding that never trains.

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
    norm: str = "rms"
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None
    qk_norm_kind: str = "rms"
    qk_norm_after_rope: bool = False
    attention_scales: tuple[float, ...] | None = None
    softcap: float | None = None
    clip_qkv: float | None = None
    sinks: bool = False
    query_growth: QueryGrowth | None = None
    embedding_scale: float = 1.0
    scale_in_table: bool = False
    residual_scale: float = 1.0
    learned_positions: int | None = None
    position_offset: int = 0
    counts_visible: bool = False
    experts: Experts | None = None
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
    def drops_out(self) -> bool:
        """Whether dropout, turned on, would change anything."""
        return any((self.attention_dropout, self.embedding_dropout, self.attention_out_dropout, self.mlp_out_dropout))

    @property
    def max_positions(self) -> int | None:
        """The length of the longest text that has positions; None where any has."""
        return None if self.learned_positions is None else self.learned_positions - self.position_offset
