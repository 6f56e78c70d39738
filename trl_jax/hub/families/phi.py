"""Phi 1 to 4, with and without experts.

phi: parallel attention and plain MLP on one layer norm, with biases everywhere.
phi3: llama with q, k, v in one tensor, gate and up in another, and LongRoPE.
phimoe: Phi-3.5-MoE: mixtral with layer norms and biases, and experts that a sparse mixer selects.
"""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader, read_rotary_dim, read_window, with_scales_by_length
from trl_jax.hub.families import Family, llama, mistral
from trl_jax.hub.tensor_map import Names, concatenated, ordered
from trl_jax.models.arch import Arch, Experts
from trl_jax.nn.moe import SparseMixer


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config, partial=True)
    dropout = config.dropout("resid_pdrop")
    return replace(
        base,
        block="parallel",
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        rotary_dim=read_rotary_dim(config, base.head_dim, 0.5),
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm="head" if config.flag("qk_layernorm") else None,
        qk_norm_kind="layer",
        head_bias=True,
        embedding_dropout=config.dropout("embd_pdrop"),
        attention_out_dropout=dropout,
        mlp_out_dropout=dropout,
    )


def names(arch: Arch) -> Names:
    layer = "model.layers.{}."
    return llama.names(arch) | {
        "decoder.layers.attention.o": layer + "self_attn.dense",
        "decoder.layers.attention.q_norm": layer + "self_attn.q_layernorm",
        "decoder.layers.attention.k_norm": layer + "self_attn.k_layernorm",
        "decoder.layers.mlp.up": layer + "mlp.fc1",
        "decoder.layers.mlp.down": layer + "mlp.fc2",
        "decoder.norm": "model.final_layernorm",
    }


def arch_v3(config: ConfigReader) -> Arch:
    base = llama.arch(config, partial=True)
    dropout = config.dropout("resid_pdrop")
    config.skip("original_max_position_embeddings")  # only for longrope
    config.dropout("embd_pdrop")  # no effect, as in transformers
    return replace(
        base,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        rotary_dim=read_rotary_dim(config, base.head_dim, 1.0),
        windows=(read_window(config),) * base.num_layers,
        attention_out_dropout=dropout,
        mlp_out_dropout=dropout,
    )


def names_v3(arch: Arch) -> Names:
    queries, keys = arch.num_heads * arch.head_dim, arch.num_key_heads * arch.head_dim
    qkv = {"attention.q": queries, "attention.k": keys, "attention.v": keys}
    names = llama.names(arch) | joined(qkv, "self_attn.qkv_proj") | gate_up(arch)
    return ordered(names, "decoder.layers.attention.o", before="decoder.layers.attention.q")


def gate_up(arch: Arch) -> Names:
    return joined({"mlp.gate": arch.mlp_size, "mlp.up": arch.mlp_size}, "mlp.gate_up_proj")


def joined(sizes: dict[str, int], module: str) -> Names:
    ours = {f"decoder.layers.{name}": size for name, size in sizes.items()}
    return concatenated("model.layers.{}." + module, ours)


_OF_ROPE = frozenset({"short_mscale", "long_mscale", "original_max_position_embeddings"})


def arch_moe(config: ConfigReader) -> Arch:
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
    config.skip("output_router_logits", "router_aux_loss_coef")  # only for the language model's loss
    config.refuse("num_experts_per_tok", 2)
    mixer = SparseMixer(config.number("router_jitter_noise"), config.number("input_jitter_noise"))
    count = config.size("num_local_experts", minimum=2)
    config.refuse("num_experts", count)  # users add it for TRL's load-balancing loss
    return Experts(count, top_k=2, size=size, renormalized=False, sparse_mixer=mixer)


FAMILIES = (
    Family("phi", "Phi", arch, names),
    Family("phi3", "Phi3", arch_v3, names_v3),
    Family(
        "phimoe",
        "Phimoe",
        arch_moe,
        mistral.names_mixtral,
        moved=((".block_sparse_moe.gate", ".mlp.router"), (".block_sparse_moe.", ".mlp.")),
    ),
)
