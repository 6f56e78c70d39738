"""nemotron: llama with layer norms that scale by 1 + weight, a plain MLP, and half of each head's channels rotated."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader, read_rotary_dim
from trl_jax.hub.families import Family, llama
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config, partial=True)
    return replace(
        base,
        norm="layer_one_plus",
        norm_eps=config.number("norm_eps", 1e-5),
        rotary_dim=read_rotary_dim(config, base.head_dim, 0.5),
        gated=False,
    )


FAMILY = Family("nemotron", "Nemotron", arch, llama.names)
