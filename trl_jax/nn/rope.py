"""Rotary position embedding and its ways of stretching."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Rope:
    """How positions turn into angles.

    `kind` is one of default, linear, llama3, yarn; the fields after `factor` are those of llama3 and yarn.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position for each pair of channels: float32 `[C / 2]`.

        All in float32 but the power, which torch rounds once: at position 100,000 one ulp is a hundredth of a radian.
        """
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        powers = (self.theta ** exponents.astype(np.float64)).astype(np.float32)
        stretch = {"default": _unchanged, "linear": _linear, "llama3": _llama3, "yarn": _yarn}[self.kind]
        return stretch(self, powers)


def _unchanged(rope: Rope, powers: np.ndarray) -> np.ndarray:
    return 1 / powers


def _linear(rope: Rope, powers: np.ndarray) -> np.ndarray:
    """Position interpolation (arXiv:2306.15595)."""
    return 1 / powers / rope.factor


def _llama3(rope: Rope, powers: np.ndarray) -> np.ndarray:
    """Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, those between are blended."""
    base = 1 / powers
    wavelength = 1 / base * (2 * math.pi)
    turns = 1 / wavelength * rope.original_length  # within the original context; in torch's order of rounding
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return (1 - kept) * base / rope.factor + kept * base


def _yarn(rope: Rope, powers: np.ndarray) -> np.ndarray:
    """YaRN's blend by parts (arXiv:2309.00071, section 3.2): a linear ramp over the index of the channel pair."""
    head_dim = 2 * len(powers)

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(rope.original_length / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(len(powers), dtype=np.float32) - low) / (high - low or 1e-3), 0, 1)
    kept = 1 - ramp
    return 1 / (rope.factor * powers) * (1 - kept) + 1 / powers * kept


def rope_angles(positions: jax.Array, rope: Rope, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Positions `[R, T]` to cosines and sines `[R, T, 1, C / 2]`, float32."""
    angles = positions[..., None, None].astype(jnp.float32) * rope.frequencies(head_dim)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate `[R, T, heads, C]`, channel k paired with k + C / 2."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
