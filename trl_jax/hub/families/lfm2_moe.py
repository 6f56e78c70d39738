"""lfm2_moe: lfm2 with experts in all layers but the first."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, lfm2
from trl_jax.hub.tensor_map import Names, in_runs
from trl_jax.models.arch import Arch, Experts, LayerKind


def arch(config: ConfigReader) -> Arch:
    config.refuse("tie_embedding", True)
    config.value("output_router_logits")
    base = lfm2.hybrid_arch(config)
    types, dense = config.names("layer_types") or [], config.size("num_dense_layers", 2, minimum=0)
    mixers = lfm2.read_mixers(config, types, base.num_layers)
    kinds = tuple(LayerKind(mixer, layer >= dense) for layer, mixer in enumerate(mixers))
    return replace(base, experts=_experts(config), kinds=kinds)


def _experts(config: ConfigReader) -> Experts:
    return Experts(
        count=config.size("num_experts"),
        top_k=config.size("num_experts_per_tok"),
        size=config.size("moe_intermediate_size"),
        renormalized=config.flag("norm_topk_prob", True),
        scores="sigmoid",
        weight_floor=1e-6,
        scale=config.number("routed_scaling_factor", 1.0),
        correction_bias=config.flag("use_expert_bias", True),
    )


def names(arch: Arch) -> Names:
    return in_runs(arch.runs, lambda kind: lfm2.mixer_names(arch, kind) | _mlp_names(kind))


def _mlp_names(kind: LayerKind) -> Names:
    ours, theirs = "decoder.layers.mlp.", "model.layers.{}.feed_forward."
    matrices = {"gate": "w1", "up": "w3", "down": "w2"}
    if not kind.experts:
        return {ours + name: theirs + place for name, place in matrices.items()}
    return {
        ours + "router": theirs + "gate",
        ours + "correction_bias": theirs + "expert_bias",
        **{ours + name: f"{theirs}experts.{{}}.{place}.weight" for name, place in matrices.items()},
    }


FAMILY = Family("lfm2_moe", "Lfm2Moe", arch, names, in_transformers=False)
