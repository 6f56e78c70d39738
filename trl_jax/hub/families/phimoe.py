"""phimoe: Phi-3.5-MoE: mixtral with layer norms and biases, and experts that a sparse mixer selects."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader, read_window, with_scales_by_length
from trl_jax.hub.families import Family, llama, mixtral
from trl_jax.models.arch import Arch, Experts
from trl_jax.nn.moe import SparseMixer

_OF_ROPE = frozenset({"short_mscale", "long_mscale", "original_max_position_embeddings"})


def arch(config: ConfigReader) -> Arch:
    config.refuse("hidden_dropout", 0.0)  # in early checkpoints, without effect
    base = llama.arch(config, extra_keys=_OF_ROPE)
    return replace(
        base,
        norm="layer",
        mlp_bias=False,
        head_bias=config.flag("lm_head_bias"),
        windows=(read_window(config),) * base.num_layers,
        ropes=tuple(with_scales_by_length(config, rope) for rope in base.ropes),
        experts=_experts(config, base.mlp_size),
    )


def _experts(config: ConfigReader, size: int) -> Experts:
    config.value("output_router_logits"), config.value("router_aux_loss_coef")  # only for the language model's loss
    config.refuse("num_experts_per_tok", 2)
    mixer = SparseMixer(config.number("router_jitter_noise"), config.number("input_jitter_noise"))
    count = config.size("num_local_experts", minimum=2)
    config.refuse("num_experts", count)  # users add it for TRL's load-balancing loss
    return Experts(count, top_k=2, size=size, renormalized=False, sparse_mixer=mixer)


FAMILY = Family(
    "phimoe",
    "Phimoe",
    arch,
    mixtral.names,
    moved=((".block_sparse_moe.gate", ".mlp.router"), (".block_sparse_moe.", ".mlp.")),
)
