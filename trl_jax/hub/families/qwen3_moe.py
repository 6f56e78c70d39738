"""qwen3_moe: qwen3 with experts."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader, read_window
from trl_jax.hub.families import Family, llama, qwen2_moe
from trl_jax.hub.families.qwen2_moe import read_experts
from trl_jax.hub.tensor_map import Names, ordered
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config)
    window = read_window(config) if config.flag("use_sliding_window") else None
    config.value("max_window_layers"), config.value("sliding_window")  # no effect unless the flag is set
    return replace(
        base,
        mlp_bias=False,
        qk_norm="head",
        windows=(window,) * base.num_layers,
        experts=read_experts(config),
    )


def names(arch: Arch) -> Names:
    mlp = "decoder.layers.mlp."
    return ordered(qwen2_moe.names(arch), mlp + "gate", mlp + "up", mlp + "down", before=mlp + "router")


FAMILY = Family("qwen3_moe", "Qwen3Moe", arch, names)
