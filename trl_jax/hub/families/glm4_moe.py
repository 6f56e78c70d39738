"""glm4_moe: GLM 4.5 to 4.7: glm's attention; deepseek_v3's experts."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader, rotated
from trl_jax.hub.families import Family, deepseek_v3, llama
from trl_jax.hub.tensor_map import Names, in_runs
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    for key in ("num_nextn_predict_layers", "num_mtp_layers", "output_router_logits"):
        config.value(key)
    base = rotated(config, llama.arch(config, partial=True), 0.5)
    return replace(
        base,
        o_bias=False,
        mlp_bias=False,
        qk_norm="head" if config.flag("use_qk_norm") else None,
        experts=deepseek_v3.read_experts(config),
        kinds=deepseek_v3.read_kinds(config, base.num_layers),
    )


def names(arch: Arch) -> Names:
    own = {name: place for name, place in llama.names(arch).items() if not name.startswith("decoder.layers.mlp.")}
    return in_runs(arch.runs, lambda kind: own | deepseek_v3.mlp_names(arch, kind))


FAMILY = Family(
    "glm4_moe",
    "Glm4Moe",
    arch,
    names,
    ignored=(r"\.rotary_emb\.inv_freq$", r"^lm_head\.bias$", r"^model\.layers\.(46|92)\."),  # predict further tokens
    in_float32=deepseek_v3.ROUTER,
    in_transformers=False,
)
