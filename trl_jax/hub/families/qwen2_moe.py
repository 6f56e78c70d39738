"""qwen2_moe: qwen2 with experts, one of them shared."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama
from trl_jax.hub.families.qwen2 import read_windows
from trl_jax.hub.tensor_map import Names, ordered
from trl_jax.models.arch import Arch, Experts


def arch(config: ConfigReader) -> Arch:
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
    config.value("output_router_logits"), config.value("router_aux_loss_coef")  # only for the language model's loss
    return Experts(
        count=config.size("num_local_experts", config.size("num_experts")),  # transformers writes the one or the other
        top_k=config.size("num_experts_per_tok"),
        size=config.size("moe_intermediate_size"),
        renormalized=config.flag("norm_topk_prob"),
        shared_size=shared_size,
    )


def names(arch: Arch) -> Names:
    mlp = "model.layers.{}.mlp."
    found = llama.names(arch) | {
        "decoder.layers.mlp.router": mlp + "gate",
        "decoder.layers.mlp.gate": mlp + "experts.{}.gate_proj.weight",
        "decoder.layers.mlp.up": mlp + "experts.{}.up_proj.weight",
        "decoder.layers.mlp.down": mlp + "experts.{}.down_proj.weight",
        "decoder.layers.mlp.shared.gate": mlp + "shared_expert.gate_proj",
        "decoder.layers.mlp.shared.up": mlp + "shared_expert.up_proj",
        "decoder.layers.mlp.shared.down": mlp + "shared_expert.down_proj",
        "decoder.layers.mlp.shared_gate": mlp + "shared_expert_gate",
    }
    return ordered(found, "decoder.layers.mlp.router", before="decoder.layers.mlp.gate")


FAMILY = Family("qwen2_moe", "Qwen2Moe", arch, names)
