"""granite: llama with multipliers on the embedding, the attention scores and the residual updates."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config)
    return replace(
        base,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0, minimum=1e-9),
        attention_scales=(config.number("attention_multiplier", 1.0),) * base.num_layers,
    )


FAMILY = Family("granite", "Granite", arch, llama.names, in_transformers=False)
