"""gemma: llama with norms that scale by 1 + weight, and a scaled embedding."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config)
    config.refuse("use_bidirectional_attention", False, None)
    activation = "gelu_pytorch_tanh" if base.activation == "gelu" else base.activation  # gelu is its old name
    return replace(
        base,
        activation=activation,
        norm="rms_one_plus",
        mlp_bias=False,
        embedding_scale=base.hidden_size**0.5,
        scale_in_table=True,
    )


FAMILY = Family("gemma", "Gemma", arch, llama.names)
