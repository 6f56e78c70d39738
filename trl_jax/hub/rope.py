"""The rope keys of config.json, in both generations: `rope_theta` + `rope_scaling`, and `rope_parameters`."""

from __future__ import annotations

import math
from typing import Any

from trl_jax.hub.config import ConfigReader
from trl_jax.nn.rope import Rope

_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    },
}  # fmt: skip


def read_rope(config: ConfigReader, *, default_theta: float = 10_000.0) -> Rope:
    """The positions of a decoder whose layers share one rope.

    Raises:
        ValueError: a type this release does not compute, an unknown or missing key, each by name.
    """
    legacy_theta = config.number("rope_theta", default_theta)
    legacy = config.value("rope_scaling", {})
    found: dict[str, Any] = {**legacy, **config.value("rope_parameters", {})}
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    found.pop("type", None)
    theta = found.pop("rope_theta", None) or legacy_theta
    if kind not in _KEYS:
        raise ValueError(
            f"{config.source}: rope_type is {kind!r}; this release of trl_jax computes {', '.join(sorted(_KEYS))}."
        )
    if found.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise ValueError(f"{config.source}: partial_rotary_factor other than 1.0 is not supported for this model_type.")
    unknown = sorted(set(found) - _KEYS[kind])
    if unknown:
        raise ValueError(f"{config.source}: rope_type {kind!r} does not take {', '.join(unknown)}.")
    if kind != "default" and "factor" not in found:
        raise ValueError(f"{config.source}: rope_type {kind!r} needs the key 'factor'.")
    return _rope(config, kind, float(theta), {key: value for key, value in found.items() if value is not None})


def _rope(config: ConfigReader, kind: str, theta: float, found: dict[str, Any]) -> Rope:
    mscale, mscale_all = found.pop("mscale", None), found.pop("mscale_all_dim", None)
    length = found.pop("original_max_position_embeddings", None)
    if kind == "yarn":
        found.setdefault("attention_factor", _yarn_attention(found["factor"], mscale, mscale_all))
    if kind in ("llama3", "yarn"):
        length = length or config.size("max_position_embeddings")
    return Rope(theta=theta, kind=kind, original_length=length or 0, **found)


def _yarn_attention(factor: float, mscale: float | None, mscale_all: float | None) -> float:
    """YaRN's temperature on cosines and sines (arXiv:2309.00071, eq. 22)."""

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale and mscale_all:
        return temperature(mscale) / temperature(mscale_all)
    return temperature(1.0)
