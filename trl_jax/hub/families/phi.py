"""phi: parallel attention and plain MLP on one layer norm, with biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader, read_rotary_dim
from trl_jax.hub.families import Family, llama
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config, partial=True)
    dropout = config.number("resid_pdrop", 0.0, maximum=0.99)
    return replace(
        base,
        block="parallel",
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        rotary_dim=read_rotary_dim(config, base.head_dim, 0.5),
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm="head" if config.flag("qk_layernorm") else None,
        qk_norm_kind="layer",
        head_bias=True,
        embedding_dropout=config.number("embd_pdrop", 0.0, maximum=0.99),
        attention_out_dropout=dropout,
        mlp_out_dropout=dropout,
    )


def names(arch: Arch) -> Names:
    layer = "model.layers.{}."
    return llama.names(arch) | {
        "decoder.layers.attention.o": layer + "self_attn.dense",
        "decoder.layers.attention.q_norm": layer + "self_attn.q_layernorm",
        "decoder.layers.attention.k_norm": layer + "self_attn.k_layernorm",
        "decoder.layers.mlp.up": layer + "mlp.fc1",
        "decoder.layers.mlp.down": layer + "mlp.fc2",
        "decoder.norm": "model.final_layernorm",
    }


FAMILY = Family("phi", "Phi", arch, names)
