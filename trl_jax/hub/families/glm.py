"""GLM 4, with and without experts.

glm: llama with half of each head's channels rotated, interleaved, and gate and up in one tensor.
glm4: glm with norms around attention and MLP.
glm4_moe: GLM 4.5 to 4.7: glm's attention; deepseek_v3's experts.
"""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader, read_rotary_dim, rotated
from trl_jax.hub.families import Family, deepseek, llama, phi
from trl_jax.hub.tensor_map import Names, in_runs
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config, partial=True)
    rotary_dim = read_rotary_dim(config, base.head_dim, 0.5)
    return replace(base, rotary_dim=rotary_dim, rope_interleaved=True, o_bias=False, mlp_bias=False)


def names(arch: Arch) -> Names:
    return llama.names(arch) | phi.gate_up(arch)


def arch_v4(config: ConfigReader) -> Arch:
    return replace(arch(config), block="sandwich")


def names_v4(arch: Arch) -> Names:
    layer = "model.layers.{}."
    return names(arch) | {
        "decoder.layers.attention_out_norm": layer + "post_self_attn_layernorm",
        "decoder.layers.mlp_norm": layer + "post_attention_layernorm",
        "decoder.layers.mlp_out_norm": layer + "post_mlp_layernorm",
    }


def arch_v4_moe(config: ConfigReader) -> Arch:
    config.skip("num_nextn_predict_layers", "num_mtp_layers", "output_router_logits")
    base = rotated(config, llama.arch(config, partial=True), 0.5)
    return replace(
        base,
        o_bias=False,
        mlp_bias=False,
        qk_norm="head" if config.flag("use_qk_norm") else None,
        experts=deepseek.read_experts(config),
        kinds=deepseek.read_kinds(config, base.num_layers),
    )


def names_v4_moe(arch: Arch) -> Names:
    dense = {name: place for name, place in llama.names(arch).items() if not name.startswith("decoder.layers.mlp.")}
    return in_runs(arch.runs, lambda kind: llama.norms_last(dense | deepseek.mlp_names(arch, kind)))


FAMILIES = (
    Family("glm", "Glm", arch, names),
    Family("glm4", "Glm4", arch_v4, names_v4),
    Family(
        "glm4_moe",
        "Glm4Moe",
        arch_v4_moe,
        names_v4_moe,
        ignored=(*Family.ignored, r"^model\.layers\.(46|92)\."),  # for multi-token prediction
        in_float32=deepseek.ROUTER,
        in_transformers=False,
    ),
)
