"""seed_oss: llama with a separate flag for the bias on o, and dropout after attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    dropout = config.number("residual_dropout", 0.0, maximum=0.99)
    return replace(
        llama.arch(config),
        o_bias=config.flag("attention_out_bias"),
        attention_out_dropout=dropout,
        mlp_out_dropout=dropout,
    )


FAMILY = Family("seed_oss", "SeedOss", arch, llama.names)
