"""minimax_m2: mixtral with norms over all of q and k, a sigmoid router with corrections, and partial rotary."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader, read_rotary_dim
from trl_jax.hub.families import Family, llama, mistral
from trl_jax.hub.tensor_map import Names, ordered
from trl_jax.models.arch import Arch

# Keys of early checkpoints that transformers does not read; it computes as if they had these values.
_FIXED = {
    "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "shared_intermediate_size": 0, "sliding_window": None,
    "use_qk_norm": True, "use_routing_bias": True,
}  # fmt: skip
# Keys of multi-token prediction, which transformers does not implement, and of parts that these models lack
_WITHOUT_EFFECT = (
    "layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta", "mlp_intermediate_size",
    "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp",
)  # fmt: skip


def arch(config: ConfigReader) -> Arch:
    config.fix(_FIXED)
    config.skip(*_WITHOUT_EFFECT)
    base = llama.arch(config, partial=True)
    config.refuse("attn_type_list", [1] * base.num_layers, None)
    rotary_dim = config.size("rotary_dim", base.head_dim, maximum=base.head_dim)
    return replace(
        base,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        rotary_dim=read_rotary_dim(config, base.head_dim, rotary_dim / base.head_dim),
        qk_norm="full",
        experts=replace(mistral.read_experts(config, base), scores="sigmoid", correction_bias=True),
    )


def names(arch: Arch) -> Names:
    correction = {"decoder.layers.mlp.correction_bias": "model.layers.{}.block_sparse_moe.e_score_correction_bias"}
    return ordered(mistral.names_mixtral(arch) | correction, *correction, before="decoder.layers.mlp.router")


FAMILY = Family("minimax_m2", "MiniMaxM2", arch, names, moved=((".block_sparse_moe.", ".mlp."),), in_transformers=False)
