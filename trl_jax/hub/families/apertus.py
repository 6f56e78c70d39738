"""apertus: llama with q and k normed per head, a plain MLP, and an activation with learned parameters."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama
from trl_jax.hub.tensor_map import Names
from trl_jax.models.arch import Arch
from trl_jax.nn.layers import ACTIVATIONS, XIELU_NAME

# The default rope of transformers' config class.
_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
# Keys of checkpoints that transformers does not read; it computes as if they had these values.
_FIXED = {"hidden_dropout": 0.0, "post_norm": False, "qk_norm": True}


def arch(config: ConfigReader) -> Arch:
    config.fix(_FIXED)
    if config.value("rope_parameters") is None and not config.section("rope_scaling"):
        config = config.with_values(rope_parameters=_ROPE)
    activation = config.one_of("hidden_act", {*ACTIVATIONS, XIELU_NAME}, XIELU_NAME)
    base = llama.arch(config.with_values(hidden_act="silu"))
    return replace(base, activation=activation, gated=False, mlp_bias=False, qk_norm="head")


def names(arch: Arch) -> Names:
    ours, theirs = "decoder.layers.mlp.activation.", "model.layers.{}.mlp.act_fn."
    return llama.names(arch) | {
        "decoder.layers.attention_norm": "model.layers.{}.attention_layernorm",
        "decoder.layers.mlp_norm": "model.layers.{}.feedforward_layernorm",
        **{ours + name: theirs + name for name in ("alpha_p", "alpha_n", "beta", "eps")},
    }


FAMILY = Family("apertus", "Apertus", arch, names, in_transformers=False)
