"""cohere: parallel attention and MLP on one layer norm without bias, and interleaved rotary channels."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    scale = config.optional_number("logit_scale")
    return replace(
        llama.arch(config),
        block="parallel",
        norm="layer_unbiased",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        rope_interleaved=True,
        mlp_bias=False,
        qk_norm="each_head" if config.flag("use_qk_norm") else None,
        qk_norm_kind="layer_unbiased",
        logit_scale=1.0 if scale is None else scale,
    )


FAMILY = Family("cohere", "Cohere", arch, llama.names, in_transformers=False)
