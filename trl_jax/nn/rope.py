"""Rotary position embeddings and their context extensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Rope:
    """Settings of a rope.

    `kind` is one of default, linear, proportional, axial, axial_in_turn, llama3, yarn, longrope; the fields after
    `axes` are only used by the last three. `channels` is the number of rotated channels, if it differs between layers;
    of a proportional rope, only this `fraction` is rotated. Cosines and sines are multiplied by `attention_factor` or,
    if any text of the batch is longer than `original_length`, by `long_attention_factor` (if not None).

    With `axes`, positions may have several axes, `[R, T, A]`: channel pair i is rotated by the position on axis
    `axes[i]`.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    channels: int | None = None
    fraction: float = 1.0
    axes: tuple[int, ...] | None = None
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    long_attention_factor: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def frequencies(self, channels: int, longest: jax.Array | int) -> np.ndarray | jax.Array:
        """Radians per position for each pair of `channels`: float32 `[channels / 2]`, rounded up if odd (as in
        transformers' gpt_neox).

        Only the power is computed in float64 and rounded once, as in torch: at position 100,000, one ulp is a hundredth
        of a radian. `longest` is the length of the longest text of the batch; only longrope uses it.
        """
        exponents = np.arange(0, channels, 2, dtype=np.float32) / np.float32(channels)
        powers = (self.theta ** exponents.astype(np.float64)).astype(np.float32)
        if self.kind == "longrope":
            return _longrope(self, powers, longest)
        return _STRETCHES[self.kind](self, powers)

    def scale(self, longest: jax.Array | int) -> jax.Array | float:
        """The factor of cosines and sines, given the length of the longest text of the batch."""
        if self.long_attention_factor is None:
            return self.attention_factor
        return jnp.where(longest > self.original_length, self.long_attention_factor, self.attention_factor)

    @property
    def switch_length(self) -> int | None:
        """The text length beyond which the whole batch is rotated differently; None if there is no such length."""
        differs = self.kind == "longrope" or self.long_attention_factor is not None
        return self.original_length if differs else None


def _unchanged(rope: Rope, powers: np.ndarray) -> np.ndarray:
    return 1 / powers


def _linear(rope: Rope, powers: np.ndarray) -> np.ndarray:
    """Position interpolation (arXiv:2306.15595)."""
    return 1 / powers / rope.factor


def _proportional(rope: Rope, powers: np.ndarray) -> np.ndarray:
    """The first pairs rotate as in the default rope, the others do not rotate at all."""
    turning = np.arange(len(powers)) < int(rope.fraction * 2 * len(powers) // 2)
    return np.where(turning, 1 / powers, np.float32(0)) / np.float32(rope.factor)


def _axial(rope: Rope, powers: np.ndarray) -> np.ndarray:
    """Two axes, each with the frequencies of a rope of half as many channels: first all pairs of one axis, then all
    pairs of the other."""
    count = (len(powers) + 1) // 2
    exponents = np.arange(0, 2 * count, 2, dtype=np.float32) / np.float32(2 * count)
    half = 1 / (rope.theta ** exponents.astype(np.float64)).astype(np.float32)
    return np.tile(half, 2)


def _axial_in_turn(rope: Rope, powers: np.ndarray) -> np.ndarray:
    """Two axes, which get alternate frequencies of a default rope: first all pairs of one axis, then all pairs of the
    other."""
    base = 1 / powers
    return np.concatenate([base[0::2], base[1::2]])


def _llama3(rope: Rope, powers: np.ndarray) -> np.ndarray:
    """Llama 3.1: divide the frequencies of long wavelengths by `factor`, keep those of short ones, and blend in
    between."""
    base = 1 / powers
    wavelength = 1 / base * (2 * math.pi)
    turns = 1 / wavelength * rope.original_length  # rotations within the original context; rounds as in torch
    unscaled = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    unscaled = np.clip(unscaled, 0.0, 1.0)
    return (1 - unscaled) * base / rope.factor + unscaled * base


def _yarn(rope: Rope, powers: np.ndarray) -> np.ndarray:
    """YaRN's NTK-by-parts blend (arXiv:2309.00071, section 3.2): a linear ramp over the index of the channel pair."""
    head_dim = 2 * len(powers)

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(rope.original_length / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(len(powers), dtype=np.float32) - low) / (high - low or 1e-3), 0, 1)
    unscaled = 1 - ramp
    return 1 / (rope.factor * powers) * (1 - unscaled) + 1 / powers * unscaled


_STRETCHES = {
    "default": _unchanged, "linear": _linear, "proportional": _proportional, "axial": _axial,
    "axial_in_turn": _axial_in_turn, "llama3": _llama3, "yarn": _yarn,
}  # fmt: skip


def _longrope(rope: Rope, powers: np.ndarray, longest: jax.Array | int) -> jax.Array:
    """LongRoPE (arXiv:2402.13753): a factor per pair; other factors if any text is longer than the original length."""
    short, long = (1 / (np.float32(factors) * powers) for factors in (rope.short_factors, rope.long_factors))
    return jnp.where(longest > rope.original_length, long, short)


def rope_angles(
    positions: jax.Array, ropes: Sequence[Rope | None], channels: int, longest: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[len(ropes), R, T, 1, pairs]`, float32, for positions `[R, T]`, or `[R, T, A]` of ropes with
    axes. A rope that is None does not rotate, nor do the last pairs of a rope with fewer channels."""
    shape = (*positions.shape[:2], 1, (channels + 1) // 2)
    cosines, sines = [], []
    for rope in ropes:
        if rope is None:
            cos, sin = jnp.ones(shape), jnp.zeros(shape)
        else:
            frequencies = rope.frequencies(rope.channels or channels, longest)
            missing = shape[-1] - frequencies.shape[-1]
            if missing:
                frequencies = jnp.pad(frequencies, [(0, 0)] * (frequencies.ndim - 1) + [(0, missing)])
            by_pair = positions[..., None] if positions.ndim == 2 else positions[..., np.asarray(rope.axes)]
            angles = by_pair[:, :, None].astype(jnp.float32) * frequencies
            cos, sin = jnp.cos(angles) * rope.scale(longest), jnp.sin(angles) * rope.scale(longest)
        cosines.append(cos)
        sines.append(sin)
    return jnp.stack(cosines), jnp.stack(sines)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False, sections: int = 1) -> jax.Array:
    """Rotate the first `2 * cos.shape[-1]` channels of `[R, T, heads, C]` and keep the others.

    Channel k is paired with channel k + half of them; if interleaved, 2k with 2k + 1. With `sections` > 1, the channels
    are split into equal sections and paired within each.
    """
    rotated, rest = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    elif sections > 1:
        halves = rotated.reshape(*x.shape[:-1], sections, 2, -1)
        first, second = (halves[..., half, :].reshape(*x.shape[:-1], -1) for half in range(2))
    else:
        first, second = jnp.split(rotated, 2, axis=-1)
    pair = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        rotated = jnp.stack(pair, axis=-1).reshape(rotated.shape)
    elif sections > 1:
        halves = (half.reshape(*x.shape[:-1], sections, -1) for half in pair)
        rotated = jnp.stack(tuple(halves), axis=-2).reshape(rotated.shape)
    else:
        rotated = jnp.concatenate(pair, axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1)
