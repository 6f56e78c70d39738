"""Hunyuan, with and without experts.

hunyuan_v1_dense: llama with q and k normed per head, after rotation.
hunyuan_v1_moe: hunyuan_v1_dense with experts, one of them shared.
"""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama, qwen
from trl_jax.hub.tensor_map import Names, ordered
from trl_jax.models.arch import Arch, Experts


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(_with_stretched_theta(config))
    return replace(base, qk_norm="head", qk_norm_after_rope=True, mlp_bias=False)


def _with_stretched_theta(config: ConfigReader) -> ConfigReader:
    """In spite of its name, `type: dynamic` with an `alpha` is a rope with a fixed, larger theta."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = config.section(key)
        alpha = scaling.get("alpha")
        if alpha and scaling.get("rope_type", scaling.get("type")) == "dynamic":
            section = ConfigReader(scaling, f"{config.source}: {key}")
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


def arch_moe(config: ConfigReader) -> Arch:
    base = arch(config)
    config.skip("output_router_logits")
    experts = Experts(
        count=config.size("num_experts"),
        top_k=_top_k(config, base.num_layers),
        size=base.mlp_size,
        renormalized=True,
        shared_size=base.mlp_size,
        shared_gated=False,
    )
    return replace(base, experts=experts)


def _top_k(config: ConfigReader, layers: int) -> int:
    """`moe_topk`: a number, or a list with the same number for every layer."""
    value = config.value("moe_topk")
    if not isinstance(value, list):
        return config.size("moe_topk")
    if not value or value != value[:1] * layers:
        raise config.wrong("moe_topk", value, "a whole number, or a list with the same one for each layer")
    return config.with_values(moe_topk=value[0]).size("moe_topk")


def names_moe(arch: Arch) -> Names:
    ours, theirs = "decoder.layers.mlp.", "model.layers.{}.mlp."
    mlp = {name: place for name, place in qwen.names_v2_moe(arch).items() if name.startswith(ours)}
    mlp.pop(ours + "shared_gate")
    mlp[ours + "router"] = theirs + "gate.wg"
    mlp |= {f"{ours}shared.{name}": f"{theirs}shared_mlp.{name}_proj" for name in ("gate", "up", "down")}
    return ordered(names(arch) | mlp, ours + "router", before=ours + "gate")


FAMILIES = (
    Family("hunyuan_v1_dense", "HunYuanDenseV1", arch, names),
    Family("hunyuan_v1_moe", "HunYuanMoEV1", arch_moe, names_moe, linear_router=True),
)
