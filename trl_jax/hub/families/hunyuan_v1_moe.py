"""hunyuan_v1_moe: hunyuan_v1_dense with experts, one of them shared."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, hunyuan_v1_dense, qwen2_moe
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import Arch, Experts


def arch(config: ConfigReader) -> Arch:
    base = hunyuan_v1_dense.arch(config)
    config.value("output_router_logits")
    experts = Experts(
        count=config.size("num_experts"),
        top_k=_top_k(config, base.num_layers),
        size=base.mlp_size,
        renormalized=True,
        shared_size=base.mlp_size,
        shared_gated=False,
    )
    return replace(base, experts=experts)


def _top_k(config: ConfigReader, layers: int) -> int:
    """A number, or a list with the same number for every layer."""
    found = config.value("moe_topk")
    if not isinstance(found, list):
        return config.size("moe_topk")
    if found != found[:1] * layers:
        raise config.wrong("moe_topk", found, "a whole number, or a list with the same one for each layer")
    return config.with_values(moe_topk=found[0]).size("moe_topk")


def names(arch: Arch) -> Names:
    ours, theirs = "decoder.layers.mlp.", "model.layers.{}.mlp."
    mlp = {name: place for name, place in qwen2_moe.names(arch).items() if name.startswith(ours)}
    mlp.pop(ours + "shared_gate")
    mlp[ours + "router"] = theirs + "gate.wg"
    mlp |= {f"{ours}shared.{name}": f"{theirs}shared_mlp.{name}_proj" for name in ("gate", "up", "down")}
    return hunyuan_v1_dense.names(arch) | mlp


FAMILY = Family("hunyuan_v1_moe", "HunYuanMoEV1", arch, names, linear_router=True)
