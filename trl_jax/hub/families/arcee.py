"""arcee: llama without a gate in its MLP."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    return replace(llama.arch(config), gated=False)


FAMILY = Family("arcee", "Arcee", arch, llama.names)
