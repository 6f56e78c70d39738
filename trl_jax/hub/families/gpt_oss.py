"""gpt_oss: attention with sinks, a window in every other layer, and experts with biases and a clamped gate."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, SLIDING, ConfigReader, read_layer_types, read_window, windows_of
from trl_jax.hub.families import Family, llama
from trl_jax.hub.tensor_map import ExpertColumns, Names, ordered
from trl_jax.models.arch import Arch, Experts
from trl_jax.nn.layers import ClampedSwiGLU

# The default rope of transformers' config class.
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def arch(config: ConfigReader) -> Arch:
    if config.value("rope_parameters") is None and not config.section("rope_scaling"):
        config = config.with_values(rope_parameters=_YARN)
    base = llama.arch(config)
    types = read_layer_types(config, [FULL if i % 2 else SLIDING for i in range(base.num_layers)])
    config.skip("output_router_logits", "router_aux_loss_coef")  # only for the language model's loss
    config.skip("experts_per_token", "initial_context_length")  # only for the original code
    return replace(
        base,
        mlp_bias=False,
        sinks=True,
        windows=windows_of(types, read_window(config)),
        experts=Experts(
            count=config.size("num_local_experts"),
            top_k=config.size("num_experts_per_tok"),
            size=base.mlp_size,
            renormalized=True,
            bias=True,
            swiglu=ClampedSwiGLU(config.number("swiglu_alpha"), config.number("swiglu_limit")),
        ),
    )


def names(arch: Arch) -> Names:
    layer, mlp, experts = "model.layers.{}.", "decoder.layers.mlp.", "model.layers.{}.mlp.experts."
    gate, up = ExpertColumns(0, 2), ExpertColumns(1, 2)  # their columns alternate
    unordered = llama.names(arch) | {
        "decoder.layers.attention.sinks": layer + "self_attn.sinks",
        mlp + "router": layer + "mlp.router",
        mlp + "gate": (experts + "gate_up_proj", gate),
        mlp + "up": (experts + "gate_up_proj", up),
        mlp + "gate_bias": (experts + "gate_up_proj_bias", gate),
        mlp + "up_bias": (experts + "gate_up_proj_bias", up),
        mlp + "down": (experts + "down_proj", ExpertColumns()),
        mlp + "down_bias": (experts + "down_proj_bias", ExpertColumns()),
    }
    unordered = ordered(unordered, mlp + "gate_bias", mlp + "up_bias", before=mlp + "down")
    return ordered(unordered, mlp + "router", before=mlp + "gate")


FAMILY = Family("gpt_oss", "GptOss", arch, names)
