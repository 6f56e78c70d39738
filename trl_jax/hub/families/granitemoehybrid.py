"""granitemoehybrid: granitemoe with an MLP that sees every token, alone or beside experts; of those without Mamba."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trl_jax.hub.checkpoint.tensor_map import Names
from trl_jax.hub.config.layer_types import FULL
from trl_jax.hub.config.reader import ConfigReader
from trl_jax.hub.families import Family, granite, granitemoe, llama, phi3
from trl_jax.models.arch import Arch, Experts

_OF_MAMBA = (
    "mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand",
    "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit",
)  # fmt: skip
_ATTEND = {"attention", FULL}
_OF_EXPERTS = ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")


def covers(raw: dict[str, Any]) -> bool:
    """Whether all layers attend."""
    types = raw.get("layer_types") or raw.get("layers_block_type")
    return isinstance(types, list) and set(map(str, types)) <= _ATTEND


def arch(config: ConfigReader) -> Arch:
    for key in (*_OF_MAMBA, *_OF_EXPERTS, "init_method"):
        config.value(key)
    config.refuse("normalization_function", "rmsnorm")
    base, shared_size = granite.arch(config), config.size("shared_intermediate_size")
    types = config.names("layer_types") or config.names("layers_block_type") or []
    if len(types) != base.num_layers or set(types) - _ATTEND:
        raise config.wrong("layer_types", types, f"{base.num_layers} times {FULL!r}: layers of Mamba are not computed")
    rotates = config.one_of("position_embedding_type", ("rope", "nope", None)) == "rope"
    return replace(
        base,
        mlp_size=shared_size,
        mlp_bias=False,
        ropes=base.ropes if rotates else (None,) * base.num_layers,
        experts=_experts(config, base, shared_size),
    )


def _experts(config: ConfigReader, base: Arch, shared_size: int) -> Experts | None:
    if config.size("num_local_experts", minimum=0) == 0:
        return None
    return replace(granitemoe.read_experts(config, base), shared_size=shared_size, shared_gated=False)


def names(arch: Arch) -> Names:
    """Attention is made last, behind the MLP."""
    found, layer, parts = llama.names(arch), "decoder.layers.", ("decoder.layers.attention.", "decoder.layers.mlp.")
    attention = {name: place for name, place in found.items() if name.startswith(parts[0])}
    others = {name: place for name, place in found.items() if not name.startswith(parts)}
    experts = {} if arch.experts is None else granitemoe.experts_names(arch.experts)
    mlp = "mlp." if arch.experts is None else "mlp.shared."
    sizes = {mlp + "gate": arch.mlp_size, mlp + "up": arch.mlp_size}
    shared = phi3.joined(sizes, "shared_mlp.input_linear")
    return others | experts | shared | {f"{layer}{mlp}down": "model.layers.{}.shared_mlp.output_linear"} | attention


FAMILY = Family(
    "granitemoehybrid",
    "GraniteMoeHybrid",
    arch,
    names,
    moved=granitemoe.MOVED,
    covers=covers,
    in_transformers=False,
)
