"""glm4: glm with norms around attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, glm
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    return replace(glm.arch(config), block="sandwich")


def names(arch: Arch) -> Names:
    layer = "model.layers.{}."
    return glm.names(arch) | {
        "decoder.layers.attention_out_norm": layer + "post_self_attn_layernorm",
        "decoder.layers.mlp_norm": layer + "post_attention_layernorm",
        "decoder.layers.mlp_out_norm": layer + "post_mlp_layernorm",
    }


FAMILY = Family("glm4", "Glm4", arch, names)
