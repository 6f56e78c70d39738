"""starcoder2: llama with layer norms, a plain MLP, and biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader, read_window
from trl_jax.hub.families import Family, llama
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    base, bias = llama.arch(config), config.flag("use_bias", True)
    dropout = config.dropout("residual_dropout")
    return replace(
        base,
        norm="layer",
        norm_eps=config.number("norm_epsilon", 1e-5),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        windows=(read_window(config),) * base.num_layers,
        embedding_dropout=config.dropout("embedding_dropout"),
        attention_out_dropout=dropout,
        mlp_out_dropout=dropout,
    )


def names(arch: Arch) -> Names:
    return llama.names(arch) | {
        "decoder.layers.mlp.up": "model.layers.{}.mlp.c_fc",
        "decoder.layers.mlp.down": "model.layers.{}.mlp.c_proj",
    }


FAMILY = Family("starcoder2", "Starcoder2", arch, names)
