"""hunyuan_v1_dense: llama with q and k normed per head, after rotation."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(_with_stretched_theta(config))
    return replace(base, qk_norm="head", qk_norm_after_rope=True, mlp_bias=False)


def _with_stretched_theta(config: ConfigReader) -> ConfigReader:
    """In spite of its name, `type: dynamic` with an `alpha` is a rope with a fixed, larger theta."""
    for key in ("rope_scaling", "rope_parameters"):
        found = config.section(key)
        alpha = found.get("alpha")
        if alpha and found.get("rope_type", found.get("type")) == "dynamic":
            section = ConfigReader(found, f"{config.source}: {key}")
            theta = section.number("rope_theta", config.number("rope_theta", 10_000.0))
            channels = llama.read_heads(config, config.size("hidden_size"))[2]
            stretched = theta * section.number("alpha") ** (channels / (channels - 2))
            return config.with_values(**{key: {"rope_type": "default", "rope_theta": stretched}})
    return config


def names(arch: Arch) -> Names:
    attention = "model.layers.{}.self_attn."
    return llama.names(arch) | {
        "decoder.layers.attention.q_norm": attention + "query_layernorm",
        "decoder.layers.attention.k_norm": attention + "key_layernorm",
    }


FAMILY = Family("hunyuan_v1_dense", "HunYuanDenseV1", arch, names)
