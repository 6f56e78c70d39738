"""olmoe: llama with experts, and norms on all of q and k."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama, qwen2_moe
from trl_jax.models.arch import Arch, Experts


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config)
    config.value("output_router_logits"), config.value("router_aux_loss_coef")  # only for the language model's loss
    experts = Experts(
        count=config.size("num_experts"),
        top_k=config.size("num_experts_per_tok"),
        size=base.mlp_size,
        renormalized=config.flag("norm_topk_prob"),
    )
    clip = config.optional_number("clip_qkv")
    return replace(base, mlp_bias=False, qk_norm="full", clip_qkv=clip, experts=experts)


FAMILY = Family("olmoe", "Olmoe", arch, qwen2_moe.names, in_transformers=False)
