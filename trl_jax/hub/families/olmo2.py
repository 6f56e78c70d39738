"""olmo2: llama with norms after attention and MLP, and on all of q and k."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    return replace(
        llama.arch(config),
        block="post",
        norm="rms_float32",
        mlp_bias=False,
        qk_norm="full",
        qk_norm_kind="rms_float32",
    )


def names(arch: Arch) -> Names:
    return llama.names(arch) | {
        "decoder.layers.attention_out_norm": "model.layers.{}.post_attention_layernorm",
        "decoder.layers.mlp_out_norm": "model.layers.{}.post_feedforward_layernorm",
    }


FAMILY = Family("olmo2", "Olmo2", arch, names)
