"""ERNIE 4.5, with and without experts.

ernie4_5: llama with interleaved rotary channels, and one flag for all biases.
ernie4_5_moe: ernie4_5 with experts in some layers, and shared experts.
"""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, deepseek, llama
from trl_jax.hub.tensor_map import Names, OneRow, in_runs
from trl_jax.models.arch import Arch, Experts, LayerKind


def arch(config: ConfigReader) -> Arch:
    bias = config.flag("use_bias")
    base = llama.arch(config.with_values(attention_bias=bias, mlp_bias=bias))
    return replace(base, rope_interleaved=True, attention_dropout=0.0)


_OF_TRAINING = ("moe_capacity", "moe_gate", "moe_use_aux_free", "output_router_logits", "router_aux_loss_coef")


def arch_moe(config: ConfigReader) -> Arch:
    config.refuse("use_bias", False)
    config.skip(*_OF_TRAINING)
    base = arch(config)
    return replace(base, experts=_experts(config), kinds=_kinds(config, base.num_layers))


def _experts(config: ConfigReader) -> Experts:
    size, shared = config.size("moe_intermediate_size"), config.size("moe_num_shared_experts", 0, minimum=0)
    return Experts(
        count=config.size("moe_num_experts"),
        top_k=config.size("moe_k"),
        size=size,
        renormalized=True,
        shared_size=size * shared or None,
        shared_gated=False,
        float32_router=True,
        weight_floor=config.number("moe_norm_min", 1e-12),
        correction_bias=True,
    )


def _kinds(config: ConfigReader, num_layers: int) -> tuple[LayerKind, ...]:
    first, last = config.size("moe_layer_start_index", 1, minimum=0), config.value("moe_layer_end_index", -1)
    last = num_layers - 1 if last == -1 else config.size("moe_layer_end_index", minimum=0)
    every = config.size("moe_layer_interval", 1)
    return tuple(LayerKind(experts=(i + 1) % every == 0 and first <= i <= last) for i in range(num_layers))


def names_moe(arch: Arch) -> Names:
    dense = {name: place for name, place in llama.names(arch).items() if not name.startswith("decoder.layers.mlp.")}
    corrections = ("model.layers.{}.mlp.moe_statics.e_score_correction_bias", OneRow())

    def of_kind(kind: LayerKind) -> Names:
        of_layer = dense | deepseek.mlp_names(arch, kind, router_first=True)
        of_layer |= {"decoder.layers.mlp.correction_bias": corrections} if kind.experts else {}
        return llama.norms_last(of_layer)

    return in_runs(arch.runs, of_kind)


FAMILIES = (
    Family("ernie4_5", "Ernie4_5", arch, llama.names, in_transformers=False),
    Family(
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        arch_moe,
        names_moe,
        moved=((".mlp.moe_statics.", ".mlp.gate.moe_statics."),),
        ignored=(*Family.ignored, r"^model\.mtp_"),
        in_float32=deepseek.ROUTER,
        in_transformers=False,
    ),
)
