"""Gemma 1 to 3.

gemma: llama with norms that scale by 1 + weight, and a scaled embedding.
gemma2: gemma with norms around attention and MLP, capped scores, and a window in every other layer.
gemma3_text: gemma2 with normed q and k, two ropes, and no caps.
"""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, SLIDING, ConfigReader, read_layer_types, read_ropes, read_window, windows_of
from trl_jax.hub.families import Family, llama
from trl_jax.hub.tensor_map import Names, ordered
from trl_jax.models.arch import Arch
from trl_jax.nn.layers import ACTIVATIONS


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config)
    config.refuse("use_bidirectional_attention", False, None)
    activation = "gelu_pytorch_tanh" if base.activation == "gelu" else base.activation  # gelu is its old name
    return replace(
        base,
        activation=activation,
        norm="rms_one_plus",
        mlp_bias=False,
        embedding_scale=base.hidden_size**0.5,
        scale_in_table=True,
    )


def arch_v2(config: ConfigReader) -> Arch:
    base = _shared(config)
    types = read_layer_types(config, [SLIDING if i % 2 == 0 else FULL for i in range(base.num_layers)])
    return replace(
        base,
        windows=windows_of(types, read_window(config)),
        softcap=config.optional_number("attn_logit_softcapping"),
    )


def _shared(config: ConfigReader) -> Arch:
    """The part of the architecture that gemma3 shares."""
    base = arch(config)
    scale = config.number("query_pre_attn_scalar", 256, minimum=1e-9) ** -0.5
    return replace(
        base,
        block="sandwich",
        logit_softcap=config.optional_number("final_logit_softcapping"),
        activation=config.one_of("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        attention_scales=(scale,) * base.num_layers,
    )


def names_v2(arch: Arch) -> Names:
    layer = "model.layers.{}."
    unordered = llama.names(arch) | {
        "decoder.layers.attention_out_norm": layer + "post_attention_layernorm",
        "decoder.layers.mlp_norm": layer + "pre_feedforward_layernorm",
        "decoder.layers.mlp_out_norm": layer + "post_feedforward_layernorm",
    }
    return ordered(unordered, "decoder.layers.attention_out_norm", before="decoder.layers.mlp_norm")


def arch_v3(config: ConfigReader) -> Arch:
    config.optional_number("attn_logit_softcapping")  # transformers never applies it
    pattern = config.size("sliding_window_pattern", 6)
    layers = config.size("num_hidden_layers", maximum=4096)
    types = read_layer_types(config, [SLIDING if (i + 1) % pattern else FULL for i in range(layers)])
    ropes = read_ropes(config.with_values(rope_theta=config.value("rope_theta", 1e6)), types, local_theta=1e4)
    base = _shared(config.with_values(rope_parameters=None, rope_scaling=None, rope_theta=None))
    return replace(
        base, qk_norm="head", qk_norm_kind=base.norm, ropes=ropes, windows=windows_of(types, read_window(config))
    )


FAMILIES = (
    Family("gemma", "Gemma", arch, llama.names),
    Family("gemma2", "Gemma2", arch_v2, names_v2),
    Family("gemma3_text", "Gemma3Text", arch_v3, names_v2),
)
