"""qwen3_5_moe_text: qwen3_5_text with experts in every layer, one of them shared."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, qwen2_moe, qwen3_5_text, qwen3_next
from trl_jax.hub.tensor_map import Names, in_runs
from trl_jax.models.arch import Arch, LayerKind


def arch(config: ConfigReader) -> Arch:
    size = config.size("moe_intermediate_size")
    base = qwen3_5_text.arch(config.with_values(intermediate_size=size))
    experts = qwen2_moe.read_experts(config, shared_size=config.size("shared_expert_intermediate_size"))
    kinds = tuple(LayerKind(kind.mixer, experts=True) for kind in base.kinds)
    return replace(base, experts=replace(experts, renormalized=True), kinds=kinds)


def names(arch: Arch) -> Names:
    mlp = {name: place for name, place in qwen2_moe.names(arch).items() if name.startswith("decoder.layers.mlp.")}
    return in_runs(arch.runs, lambda kind: qwen3_next.layer_names(arch, kind, mlp, qwen3_5_text.projections))


FAMILY = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeText",
    arch,
    names,
    ignored=qwen3_next.IGNORED,
    in_transformers=False,
    **qwen3_next.HEADS,
)
