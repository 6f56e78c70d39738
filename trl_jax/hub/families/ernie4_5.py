"""ernie4_5: llama with interleaved rotary channels, and one flag for all biases."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    bias = config.flag("use_bias")
    base = llama.arch(config.with_values(attention_bias=bias, mlp_bias=bias))
    return replace(base, rope_interleaved=True, attention_dropout=0.0)


FAMILY = Family("ernie4_5", "Ernie4_5", arch, llama.names, in_transformers=False)
