"""helium: llama with interleaved rotary channels and norms that scale in float32."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    return replace(llama.arch(config), rope_interleaved=True, norm="rms_float32", o_bias=False)


FAMILY = Family("helium", "Helium", arch, llama.names)
