"""deepseek_v2: latent attention, and softmax-routed experts with a shared one."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, deepseek_v3
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import Arch, Experts

_SAID = {"scoring_func": "softmax", "moe_layer_freq": 1, "mlp_bias": False}


def arch(config: ConfigReader) -> Arch:
    for key, value in _SAID.items():
        config.refuse(key, value)
    config.value("norm_topk_prob")  # transformers' router does not read it
    base = deepseek_v3.latent_arch(config.with_values(num_key_value_heads=_key_heads(config)))
    kinds = deepseek_v3.read_kinds(config, base.num_layers)
    return replace(base, rope_interleaved=True, experts=_experts(config), kinds=kinds)


def _key_heads(config: ConfigReader) -> int:
    return config.size("num_key_value_heads", config.size("num_attention_heads"))


def _experts(config: ConfigReader) -> Experts:
    grouped = config.one_of("topk_method", ("greedy", "group_limited_greedy"), "greedy") == "group_limited_greedy"
    size, count = config.size("moe_intermediate_size"), config.size("n_routed_experts")
    groups, top_groups = (config.size("n_group"), config.size("topk_group")) if grouped else (1, 1)
    config.value("n_group"), config.value("topk_group")
    if count % groups:
        raise config.wrong("n_routed_experts", count, f"a multiple of n_group {groups}")
    return Experts(
        count=count,
        top_k=config.size("num_experts_per_tok"),
        size=size,
        renormalized=False,
        shared_size=size * config.size("n_shared_experts"),
        shared_gated=False,
        float32_router=True,
        scale=config.number("routed_scaling_factor", 1.0),
        groups=groups,
        top_groups=top_groups,
        group_best=1,
    )


def names(arch: Arch) -> Names:
    return deepseek_v3.names(arch)


FAMILY = Family("deepseek_v2", "DeepseekV2", arch, names, in_float32=deepseek_v3.ROUTER)
