"""Qwen 2 and 3, with and without experts.

qwen2: llama with biases on q, k and v, and a sliding window in some layers.
qwen2_moe: qwen2 with experts, one of them shared.
qwen3: llama with q and k normed per head, and a sliding window in some layers.
qwen3_moe: qwen3 with experts.
"""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, SLIDING, ConfigReader, read_layer_types, read_window, windows_of
from trl_jax.hub.families import Family, llama
from trl_jax.hub.tensor_map import Names, ordered
from trl_jax.models.arch import Arch, Experts


def arch_v2(config: ConfigReader) -> Arch:
    base = llama.arch(config)
    windows = read_windows(config, base.num_layers)
    return replace(base, qkv_bias=True, o_bias=False, mlp_bias=False, windows=windows)


def read_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: from `layer_types`, or in all layers from `max_window_layers` on."""
    used = config.flag("use_sliding_window") and not config.is_null("sliding_window")
    first = config.size("max_window_layers", 28, minimum=0)
    default = [SLIDING if used and i >= first else FULL for i in range(num_layers)]
    types = read_layer_types(config, default)
    if SLIDING in types and not used:
        raise ValueError(
            f"{config.source}: layer_types names {SLIDING} but use_sliding_window is false or sliding_window null. "
            "Make them agree."
        )
    config.skip("sliding_window")  # no effect without use_sliding_window
    return windows_of(types, config.size("sliding_window", 4096) if used else None)


def arch_v2_moe(config: ConfigReader) -> Arch:
    base = llama.arch(config)
    return replace(
        base,
        qkv_bias=config.flag("qkv_bias", True),
        o_bias=False,
        mlp_bias=False,
        windows=read_windows(config, base.num_layers),
        experts=read_experts(config, shared_size=config.size("shared_expert_intermediate_size")),
    )


def read_experts(config: ConfigReader, shared_size: int | None = None) -> Experts:
    """The experts of the Qwen families. Models with some layers without experts are refused."""
    config.refuse("decoder_sparse_step", 1)
    config.refuse("mlp_only_layers", [], None)
    config.skip("output_router_logits", "router_aux_loss_coef")  # only for the language model's loss
    return Experts(
        count=config.size("num_local_experts", config.size("num_experts")),  # transformers writes the one or the other
        top_k=config.size("num_experts_per_tok"),
        size=config.size("moe_intermediate_size"),
        renormalized=config.flag("norm_topk_prob"),
        shared_size=shared_size,
    )


def names_v2_moe(arch: Arch) -> Names:
    mlp = "model.layers.{}.mlp."
    unordered = llama.names(arch) | {
        "decoder.layers.mlp.router": mlp + "gate",
        "decoder.layers.mlp.gate": mlp + "experts.{}.gate_proj.weight",
        "decoder.layers.mlp.up": mlp + "experts.{}.up_proj.weight",
        "decoder.layers.mlp.down": mlp + "experts.{}.down_proj.weight",
        "decoder.layers.mlp.shared.gate": mlp + "shared_expert.gate_proj",
        "decoder.layers.mlp.shared.up": mlp + "shared_expert.up_proj",
        "decoder.layers.mlp.shared.down": mlp + "shared_expert.down_proj",
        "decoder.layers.mlp.shared_gate": mlp + "shared_expert_gate",
    }
    return ordered(unordered, "decoder.layers.mlp.router", before="decoder.layers.mlp.gate")


def arch_v3(config: ConfigReader) -> Arch:
    base = llama.arch(config)
    return replace(base, qk_norm="head", mlp_bias=False, windows=read_windows(config, base.num_layers))


def arch_v3_moe(config: ConfigReader) -> Arch:
    base = llama.arch(config)
    window = read_window(config) if config.flag("use_sliding_window") else None
    config.skip("max_window_layers", "sliding_window")  # no effect unless the flag is set
    return replace(
        base,
        mlp_bias=False,
        qk_norm="head",
        windows=(window,) * base.num_layers,
        experts=read_experts(config),
    )


def names_v3_moe(arch: Arch) -> Names:
    mlp = "decoder.layers.mlp."
    return ordered(names_v2_moe(arch), mlp + "gate", mlp + "up", mlp + "down", before=mlp + "router")


FAMILIES = (
    Family("qwen2", "Qwen2", arch_v2, llama.names),
    Family("qwen2_moe", "Qwen2Moe", arch_v2_moe, names_v2_moe),
    Family("qwen3", "Qwen3", arch_v3, llama.names),
    Family("qwen3_moe", "Qwen3Moe", arch_v3_moe, names_v3_moe),
)
