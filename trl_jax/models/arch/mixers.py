"""The facts of what stands in the place of attention, or changes it: the parts of a layer that mix tokens."""

from __future__ import annotations

from dataclasses import dataclass


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
