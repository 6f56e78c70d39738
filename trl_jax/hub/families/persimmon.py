"""persimmon: layer norms, a plain MLP, half of each head's channels rotated; q, k and v of each head in one tensor."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader, read_rotary_dim
from trl_jax.hub.families import Family, llama, phi
from trl_jax.hub.tensor_map import Names, PerHead
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config, partial=True)
    return replace(
        base,
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        rotary_dim=read_rotary_dim(config, base.head_dim, 0.5),
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm="head" if config.flag("qk_layernorm", True) else None,
        qk_norm_kind="layer",
        mlp_out_dropout=config.dropout("hidden_dropout"),
    )


def names(arch: Arch) -> Names:
    layer = "model.layers.{}."
    return (
        phi.names(arch)
        | per_head(layer + "self_attn.query_key_value", arch.num_heads)
        | {
            "decoder.layers.mlp.up": layer + "mlp.dense_h_to_4h",
            "decoder.layers.mlp.down": layer + "mlp.dense_4h_to_h",
        }
    )


def per_head(module: str, heads: int) -> Names:
    return {f"decoder.layers.attention.{name}": (module, PerHead(i, heads)) for i, name in enumerate("qkv")}


FAMILY = Family("persimmon", "Persimmon", arch, names)
