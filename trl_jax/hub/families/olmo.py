"""olmo: llama with norms that have no parameters, and clipped q, k and v."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    clip = config.optional_number("clip_qkv")
    return replace(llama.arch(config), norm="layer_plain", norm_eps=1e-5, mlp_bias=False, clip_qkv=clip)


FAMILY = Family("olmo", "Olmo", arch, llama.names)
