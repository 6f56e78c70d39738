"""mixtral: mistral with experts."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama, mistral
from trl_jax.hub.tensor_map import Names, ordered
from trl_jax.models.arch import Arch, Experts


def arch(config: ConfigReader) -> Arch:
    base = mistral.arch(config)
    return replace(base, experts=read_experts(config, base))


def read_experts(config: ConfigReader, base: Arch) -> Experts:
    """Experts as wide as the MLP of `base`, which they replace."""
    config.refuse("router_jitter_noise", 0.0)
    config.value("output_router_logits"), config.value("router_aux_loss_coef")  # only for the language model's loss
    count, top_k = config.size("num_local_experts", 8), config.size("num_experts_per_tok", 2)
    return Experts(count, top_k, size=base.mlp_size, renormalized=True)


def names(arch: Arch) -> Names:
    experts = "model.layers.{}.block_sparse_moe."
    found = llama.names(arch) | {
        "decoder.layers.mlp.router": experts + "gate",
        "decoder.layers.mlp.gate": experts + "experts.{}.w1.weight",
        "decoder.layers.mlp.up": experts + "experts.{}.w3.weight",
        "decoder.layers.mlp.down": experts + "experts.{}.w2.weight",
    }
    return ordered(found, "decoder.layers.mlp.router", before="decoder.layers.mlp.gate")


FAMILY = Family("mixtral", "Mixtral", arch, names, moved=((".block_sparse_moe.", ".mlp."),))
