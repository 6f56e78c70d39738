"""The rope keys of config.json, in both generations: `rope_theta` + `rope_scaling`, and `rope_parameters`."""

from __future__ import annotations

import math
from typing import Any

from trl_jax.hub.config import ConfigReader
from trl_jax.nn.rope import Rope

_NEEDED = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor"},
}
_TAKEN = {
    "default": set(),
    "linear": set(),
    "llama3": {"original_max_position_embeddings"},
    "yarn": {
        "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    },
}  # fmt: skip
KINDS = tuple(_NEEDED)
_TINY = 1e-9  # what a number that is divided by must at least be
_LEAST_THETA = 1.001  # and one whose logarithm is


def read_rope(config: ConfigReader, *, default_theta: float = 10_000.0) -> Rope:
    """The positions of a decoder whose layers share one rope.

    Raises:
        ValueError: a type this release does not compute, an unknown or missing key, each by name.
    """
    theta = config.number("rope_theta", default_theta, least=_LEAST_THETA)
    legacy, today = config.section("rope_scaling"), config.section("rope_parameters")
    section = "rope_scaling" if legacy else "rope_parameters"  # transformers lets the older key win
    found = {key: value for key, value in (legacy or today).items() if value is not None}
    rope = ConfigReader(found, f"{config.source}: {section}")
    kind = rope.one_of("rope_type", _NEEDED, rope.one_of("type", _NEEDED, "default"))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.wrong("partial_rotary_factor", found["partial_rotary_factor"], "1.0 for this model_type")
    _check_keys(rope, kind)
    theta = rope.number("rope_theta", theta, least=_LEAST_THETA)
    if kind == "default":
        return Rope(theta=theta)
    return Rope(
        theta=theta, kind=kind, factor=rope.number("factor", least=_TINY), **_details(config, rope, kind)
    )


def _check_keys(rope: ConfigReader, kind: str) -> None:
    found = set(rope.raw) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    unknown, missing = sorted(found - _NEEDED[kind] - _TAKEN[kind]), sorted(_NEEDED[kind] - found)
    if unknown:
        raise ValueError(f"{rope.source}: rope_type {kind!r} does not take {', '.join(unknown)}.")
    if missing:
        raise ValueError(f"{rope.source}: rope_type {kind!r} needs {', '.join(missing)}.")


def _details(config: ConfigReader, rope: ConfigReader, kind: str) -> dict[str, Any]:
    """What the type needs beside its factor, named as in Rope."""
    if kind == "linear":
        return {}
    length = rope.size("original_max_position_embeddings", config.value("max_position_embeddings"))
    if kind == "llama3":
        low = rope.number("low_freq_factor")
        high = rope.number("high_freq_factor", least=low + _TINY)
        return {"original_length": length, "low_freq_factor": low, "high_freq_factor": high}
    factor = rope.number("factor", least=_TINY)
    mscale, mscale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    return {
        "original_length": length,
        "attention_factor": rope.number("attention_factor", _yarn_attention(factor, mscale, mscale_all)),
        "beta_fast": rope.number("beta_fast", 32.0) or 32.0,
        "beta_slow": rope.number("beta_slow", 1.0) or 1.0,
        "truncate": rope.flag("truncate", True),
    }


def _yarn_attention(factor: float, mscale: float, mscale_all: float) -> float:
    """YaRN's temperature on cosines and sines (arXiv:2309.00071, eq. 22); a scale of 0 is one not given."""

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale and mscale_all:
        return temperature(mscale) / temperature(mscale_all)
    return temperature(1.0)
