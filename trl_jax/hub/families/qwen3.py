"""qwen3: llama with q and k normed per head, and a sliding window in some layers."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama
from trl_jax.hub.families.qwen2 import read_windows
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config)
    return replace(base, qk_norm="head", mlp_bias=False, windows=read_windows(config, base.num_layers))


FAMILY = Family("qwen3", "Qwen3", arch, llama.names)
