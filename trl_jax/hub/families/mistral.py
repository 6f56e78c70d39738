"""Mistral, Ministral and Mixtral.

mistral: llama without biases, with one sliding window for all layers.
ministral: mistral with the window in some layers only.
ministral3: mistral with queries scaled by their position.
mixtral: mistral with experts.
"""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, SLIDING, ConfigReader, read_layer_types, read_window, windows_of
from trl_jax.hub.families import Family, llama
from trl_jax.hub.tensor_map import Names, ordered
from trl_jax.models.arch import Arch, Experts, QueryGrowth


def arch(config: ConfigReader, *, extra_keys: frozenset[str] = frozenset()) -> Arch:
    # attention_bias has no effect, as in transformers.
    base = llama.arch(config, extra_keys=extra_keys)
    windows = (read_window(config),) * base.num_layers
    return replace(base, qkv_bias=False, o_bias=False, mlp_bias=False, windows=windows)


def arch_ministral(config: ConfigReader) -> Arch:
    base = arch(config)
    window = read_window(config)
    types = read_layer_types(config, [FULL if window is None else SLIDING] * base.num_layers)
    return replace(base, windows=windows_of(types, window))


_MINISTRAL3_ROPE = {
    "type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def arch_ministral3(config: ConfigReader) -> Arch:
    if not config.section("rope_parameters") and not config.section("rope_scaling"):
        config = config.with_values(rope_parameters=_MINISTRAL3_ROPE)
    base = arch(config, extra_keys=frozenset({"llama_4_scaling_beta", "max_position_embeddings"}))
    rope = ConfigReader(config.section("rope_parameters"), f"{config.source}: rope_parameters")
    original = rope.size("original_max_position_embeddings")
    return replace(base, query_growth=QueryGrowth(rope.number("llama_4_scaling_beta"), original))


def arch_mixtral(config: ConfigReader) -> Arch:
    base = arch(config)
    return replace(base, experts=read_experts(config, base))


def read_experts(config: ConfigReader, base: Arch) -> Experts:
    """Experts as wide as the MLP of `base`, which they replace."""
    config.refuse("router_jitter_noise", 0.0)
    config.skip("output_router_logits", "router_aux_loss_coef")  # only for the language model's loss
    count, top_k = config.size("num_local_experts", 8), config.size("num_experts_per_tok", 2)
    return Experts(count, top_k, size=base.mlp_size, renormalized=True)


def names_mixtral(arch: Arch) -> Names:
    experts = "model.layers.{}.block_sparse_moe."
    unordered = llama.names(arch) | {
        "decoder.layers.mlp.router": experts + "gate",
        "decoder.layers.mlp.gate": experts + "experts.{}.w1.weight",
        "decoder.layers.mlp.up": experts + "experts.{}.w3.weight",
        "decoder.layers.mlp.down": experts + "experts.{}.w2.weight",
    }
    return ordered(unordered, "decoder.layers.mlp.router", before="decoder.layers.mlp.gate")


FAMILIES = (
    Family("mistral", "Mistral", arch, llama.names),
    Family("ministral", "Ministral", arch_ministral, llama.names),
    Family("ministral3", "Ministral3", arch_ministral3, llama.names),
    Family("mixtral", "Mixtral", arch_mixtral, names_mixtral, moved=((".block_sparse_moe.", ".mlp."),)),
)
