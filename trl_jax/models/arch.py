"""The facts that tell one decoder from another."""

from __future__ import annotations

from dataclasses import dataclass

from trl_jax.nn.rope import Rope


@dataclass(frozen=True)
class Arch:
    """A decoder's facts. Sizes are counts of channels, heads, layers or tokens.

    A fact that may differ from layer to layer is a tuple with one entry a layer. `padding_idx` is the row of the
    embedding that never trains.
    """

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    tied_embeddings: bool = False
    padding_idx: int | None = None
