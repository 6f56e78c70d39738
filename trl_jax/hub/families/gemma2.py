"""gemma2: gemma with norms around attention and MLP, capped scores, and a window in every other layer."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, SLIDING, ConfigReader, read_layer_types, read_window, windows_of
from trl_jax.hub.families import Family, gemma, llama
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import Arch
from trl_jax.nn.layers import ACTIVATIONS


def arch(config: ConfigReader) -> Arch:
    base = shared(config)
    types = read_layer_types(config, [SLIDING if i % 2 == 0 else FULL for i in range(base.num_layers)])
    return replace(
        base,
        windows=windows_of(types, read_window(config)),
        softcap=config.optional_number("attn_logit_softcapping"),
    )


def shared(config: ConfigReader) -> Arch:
    """The part of the architecture that gemma3 shares."""
    base = gemma.arch(config)
    scale = config.number("query_pre_attn_scalar", 256, minimum=1e-9) ** -0.5
    return replace(
        base,
        block="sandwich",
        logit_softcap=config.optional_number("final_logit_softcapping"),
        activation=config.one_of("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        attention_scales=(scale,) * base.num_layers,
    )


def names(arch: Arch) -> Names:
    layer = "model.layers.{}."
    return llama.names(arch) | {
        "decoder.layers.attention_out_norm": layer + "post_attention_layernorm",
        "decoder.layers.mlp_norm": layer + "pre_feedforward_layernorm",
        "decoder.layers.mlp_out_norm": layer + "post_feedforward_layernorm",
    }


FAMILY = Family("gemma2", "Gemma2", arch, names)
