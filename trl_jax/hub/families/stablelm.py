"""stablelm: llama with layer norms and a quarter of each head's channels rotated."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader, read_rotary_dim
from trl_jax.hub.families import Family, llama
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config, partial=True)
    config.refuse("qk_layernorm", False)
    return replace(
        base,
        block="parallel" if config.flag("use_parallel_residual") else "pre",
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        rotary_dim=read_rotary_dim(config, base.head_dim, 0.25),
        qkv_bias=config.flag("use_qkv_bias"),
        o_bias=False,
        mlp_bias=False,
        mlp_out_dropout=config.number("hidden_dropout", 0.0, maximum=0.99),
    )


FAMILY = Family("stablelm", "StableLm", arch, llama.names)
