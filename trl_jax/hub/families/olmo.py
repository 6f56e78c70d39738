"""OLMo 1 to 3 and OLMoE.

olmo: llama with norms that have no parameters, and clipped q, k and v.
olmo2: llama with norms after attention and MLP, and on all of q and k.
olmo3: olmo2 with a window in three of four layers, and another rope in these.
olmoe: llama with experts, and norms on all of q and k.
"""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, SLIDING, ConfigReader, read_layer_types, read_ropes, read_window, windows_of
from trl_jax.hub.families import Family, llama, qwen
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import Arch, Experts


def arch(config: ConfigReader) -> Arch:
    clip = config.optional_number("clip_qkv")
    return replace(llama.arch(config), norm="layer_plain", norm_eps=1e-5, mlp_bias=False, clip_qkv=clip)


def arch_v2(config: ConfigReader) -> Arch:
    return replace(
        llama.arch(config),
        block="post",
        norm="rms_float32",
        mlp_bias=False,
        qk_norm="full",
        qk_norm_kind="rms_float32",
    )


def names_v2(arch: Arch) -> Names:
    return llama.names(arch) | {
        "decoder.layers.attention_out_norm": "model.layers.{}.post_attention_layernorm",
        "decoder.layers.mlp_out_norm": "model.layers.{}.post_feedforward_layernorm",
    }


def arch_v3(config: ConfigReader) -> Arch:
    layers = config.size("num_hidden_layers", maximum=4096)
    types = read_layer_types(config, [SLIDING if (i + 1) % 4 else FULL for i in range(layers)])
    ropes = read_ropes(config, types, local_theta=500_000.0)  # regardless of rope_theta
    base = arch_v2(config.with_values(rope_parameters=None, rope_scaling=None))
    return replace(base, ropes=ropes, windows=windows_of(types, read_window(config)))


def arch_moe(config: ConfigReader) -> Arch:
    base = llama.arch(config)
    config.skip("output_router_logits", "router_aux_loss_coef")  # only for the language model's loss
    experts = Experts(
        count=config.size("num_experts"),
        top_k=config.size("num_experts_per_tok"),
        size=base.mlp_size,
        renormalized=config.flag("norm_topk_prob"),
    )
    clip = config.optional_number("clip_qkv")
    return replace(base, mlp_bias=False, qk_norm="full", clip_qkv=clip, experts=experts)


FAMILIES = (
    Family("olmo", "Olmo", arch, llama.names),
    Family("olmo2", "Olmo2", arch_v2, names_v2),
    Family("olmo3", "Olmo3", arch_v3, names_v2),
    Family("olmoe", "Olmoe", arch_moe, qwen.names_v2_moe, in_transformers=False),
)
