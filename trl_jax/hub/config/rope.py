"""The rope keys of config.json, in both generations: `rope_theta` + `rope_scaling`, and `rope_parameters`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trl_jax.core.printable import listed
from trl_jax.hub.config.reader import ConfigReader
from trl_jax.models.arch import Arch
from trl_jax.nn.rope import Rope

_NEEDED = {
    "default": set(),
    "linear": {"factor"},
    "proportional": set(),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor"},
    "longrope": {"short_factor", "long_factor"},
}
_TAKEN = {
    "default": set(),
    "linear": set(),
    "proportional": {"factor"},
    "llama3": {"original_max_position_embeddings"},
    "yarn": {
        "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    },
    "longrope": {"original_max_position_embeddings", "attention_factor", "factor"},
}  # fmt: skip
_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
KINDS = tuple(_NEEDED)
_OF_ALL = tuple(kind for kind in KINDS if kind != "proportional")  # which asks for the channels of each kind of layer
_TINY = 1e-9  # the least that is divided by
_LEAST_THETA = 1.001  # the least whose logarithm is divided by
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_rope(config: ConfigReader, *, partial: bool = False, extra_keys: frozenset[str] = frozenset()) -> Rope:
    """The positions of a decoder whose layers share one rope.

    Args:
        partial: whether `partial_rotary_factor` is a fact of this model_type (see `read_rotary_dim`) or refused.
        extra_keys: keys of the section that the family reads itself.

    Raises:
        ValueError: a type this release does not compute, an unknown or missing key, each by name.
    """
    theta = config.number("rope_theta", 10_000.0, minimum=_LEAST_THETA)
    return _rope(config, _section(config), theta, partial=partial, extra_keys=extra_keys)


def read_ropes(
    config: ConfigReader, types: list[str], *, local_theta: float, channels: Mapping[str, int] | None = None
) -> tuple[Rope, ...]:
    """The rope of each layer, where `rope_parameters` has a section for each of the layer's `types`.

    The older keys: `rope_scaling` is for full attention alone, `rope_local_base_freq` the theta of sliding attention.

    Args:
        channels: those of a head by type, where they differ; only such ropes may be proportional.
    """
    theta = config.number("rope_theta", 10_000.0, minimum=_LEAST_THETA)
    thetas = {_FULL: theta, _SLIDING: config.number("rope_local_base_freq", local_theta, minimum=_LEAST_THETA)}
    nested, legacy = config.section("rope_parameters"), config.section("rope_scaling")
    unknown = sorted(set(nested) - {_FULL, _SLIDING})
    if unknown:
        raise config.wrong("rope_parameters", unknown, f"sections for {_FULL} and {_SLIDING}")
    ropes = {}
    for kind, default in thetas.items():
        section = {"rope_type": "default", **(nested.get(kind) or {})}  # a bare `type` has no effect
        section = section | legacy if kind == _FULL else section
        source = f"{config.source}: rope_parameters.{kind}"
        rope = ConfigReader(_without_null(section), source)
        if channels is not None and section["rope_type"] == "proportional":
            ropes[kind] = _proportional(rope, default)
        else:
            ropes[kind] = _rope(config, rope, default, partial=False)
        ropes[kind] = ropes[kind] if channels is None else replace(ropes[kind], channels=channels[kind])
    return tuple(ropes[kind] for kind in types)


def read_rotary_dim(
    config: ConfigReader, head_dim: int, default: float, key: str = "partial_rotary_factor", *, whole: bool = False
) -> int:
    """The number of rotated channels of a head: `partial_rotary_factor` of the section, or `key` of the config.

    `whole`: any whole number will do, where transformers computes it; for an odd one see `Rope.frequencies`.
    """
    fraction = config.number(key, default, maximum=1.0)
    fraction = _section(config).number("partial_rotary_factor", fraction, maximum=1.0)
    channels = int(head_dim * fraction)
    if not whole and (channels < 2 or channels % 2):
        raise config.wrong(key, fraction, f"a share of the {head_dim} channels of a head that is even and at least 2")
    return channels


def rotated(config: ConfigReader, arch: Arch, default: float, key: str = "partial_rotary_factor") -> Arch:
    """The facts of a model with so many rotated channels, in the smallest ones an odd number or none; arguments as of
    `read_rotary_dim`."""
    whole = arch.ropes[0].kind in ("default", "linear")
    rotary_dim = read_rotary_dim(config, arch.head_dim, default, key, whole=whole)
    return replace(arch, rotary_dim=rotary_dim, ropes=arch.ropes if rotary_dim else (None,) * arch.num_layers)


def with_scales_by_length(config: ConfigReader, rope: Rope) -> Rope:
    """The rope as phimoe has it: any but the default one is scaled by `short_mscale` or, for long texts,
    `long_mscale`. Its frequencies are those of short texts, however long a text is, as in transformers 5.23."""
    if rope.kind == "default":
        return rope
    section, length = _section(config), config.value("original_max_position_embeddings")
    length = config.size("max_position_embeddings") if length is None else length
    return replace(
        rope,
        original_length=section.size("original_max_position_embeddings", length),
        attention_factor=section.number("short_mscale"),
        long_attention_factor=section.number("long_mscale"),
        long_factors=rope.short_factors,
    )


def read_score_scale(config: ConfigReader) -> float:
    """The factor of scores in DeepSeek's models where yarn has `mscale_all_dim`, as in transformers; else 1."""
    section = _section(config)
    kind = section.value("rope_type", section.value("type", "default"))
    mscale = section.number("mscale_all_dim", 0.0)
    if kind == "default" or not mscale:
        return 1.0
    factor = section.number("factor")
    return (0.1 * mscale * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


def _section(config: ConfigReader) -> ConfigReader:
    """`rope_scaling` or else `rope_parameters`: transformers lets the older key win."""
    legacy, current = config.section("rope_scaling"), config.section("rope_parameters")
    name = "rope_scaling" if legacy else "rope_parameters"
    return ConfigReader(_without_null(legacy or current), f"{config.source}: {name}")


def _without_null(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value is not None}


def _rope(
    config: ConfigReader, rope: ConfigReader, theta: float, *, partial: bool, extra_keys: frozenset[str] = frozenset()
) -> Rope:
    kind = rope.one_of("rope_type", _OF_ALL, rope.one_of("type", _OF_ALL, "default"))
    if not partial and rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.wrong("partial_rotary_factor", rope.raw["partial_rotary_factor"], "1.0 for this model_type")
    _check_keys(rope, kind, extra_keys)
    theta = rope.number("rope_theta", theta, minimum=_LEAST_THETA)
    if kind == "default":
        return Rope(theta=theta)
    if kind == "longrope":
        return Rope(theta=theta, kind=kind, **_longrope_details(config, rope))
    return Rope(theta=theta, kind=kind, factor=rope.number("factor", minimum=_TINY), **_details(config, rope, kind))


def _proportional(rope: ConfigReader, theta: float) -> Rope:
    """A rope of which some pairs of channels stand still, among as many as there are."""
    _check_keys(rope, "proportional", frozenset())
    theta = rope.number("rope_theta", theta, minimum=_LEAST_THETA)
    fraction = rope.number("partial_rotary_factor", 1.0, maximum=1.0)
    return Rope(theta=theta, kind="proportional", factor=rope.number("factor", 1.0, minimum=_TINY), fraction=fraction)


def _check_keys(rope: ConfigReader, kind: str, extra_keys: frozenset[str]) -> None:
    keys = set(rope.raw) - _ALWAYS - extra_keys
    unknown, missing = sorted(keys - _NEEDED[kind] - _TAKEN[kind]), sorted(_NEEDED[kind] - keys)
    if unknown:
        raise ValueError(f"{rope.source}: rope_type {kind!r} does not take {listed(unknown)}.")
    if missing:
        raise ValueError(f"{rope.source}: rope_type {kind!r} needs {', '.join(missing)}.")


def _details(config: ConfigReader, rope: ConfigReader, kind: str) -> dict[str, Any]:
    """The fields of Rope that the type needs besides its factor."""
    if kind == "linear":
        return {}
    length = rope.size("original_max_position_embeddings", config.value("max_position_embeddings"))
    if kind == "llama3":
        low = rope.number("low_freq_factor")
        high = rope.number("high_freq_factor", minimum=low + _TINY)
        return {"original_length": length, "low_freq_factor": low, "high_freq_factor": high}
    factor = rope.number("factor", minimum=_TINY)
    mscale, mscale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    return {
        "original_length": length,
        "attention_factor": rope.number("attention_factor", _yarn_attention(factor, mscale, mscale_all)),
        "beta_fast": rope.number("beta_fast", 32.0) or 32.0,
        "beta_slow": rope.number("beta_slow", 1.0) or 1.0,
        "truncate": rope.flag("truncate", True),
    }


def _yarn_attention(factor: float, mscale: float, mscale_all: float) -> float:
    """YaRN's temperature on cosines and sines (arXiv:2309.00071, eq. 22); a scale of 0 counts as absent."""

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale and mscale_all:
        return temperature(mscale) / temperature(mscale_all)
    return temperature(1.0)


def _longrope_details(config: ConfigReader, rope: ConfigReader) -> dict[str, Any]:
    longest = config.size("max_position_embeddings")
    original = config.size("original_max_position_embeddings", longest)
    original = rope.size("original_max_position_embeddings", original, minimum=2)
    stretch = rope.number("factor", longest / original, minimum=_TINY)
    temperature = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return {
        "original_length": original,
        "attention_factor": rope.number("attention_factor", temperature),
        "short_factors": rope.numbers("short_factor"),
        "long_factors": rope.numbers("long_factor"),
    }
