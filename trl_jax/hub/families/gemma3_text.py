"""gemma3_text: gemma2 with normed q and k, two ropes, and no caps."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, SLIDING, ConfigReader, read_layer_types, read_ropes, read_window, windows_of
from trl_jax.hub.families import Family, gemma2
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    config.optional_number("attn_logit_softcapping")  # transformers never applies it
    pattern = config.size("sliding_window_pattern", 6)
    layers = config.size("num_hidden_layers", maximum=4096)
    types = read_layer_types(config, [SLIDING if (i + 1) % pattern else FULL for i in range(layers)])
    ropes = read_ropes(config.with_values(rope_theta=config.value("rope_theta", 1e6)), types, local_theta=1e4)
    base = gemma2.shared(config.with_values(rope_parameters=None, rope_scaling=None, rope_theta=None))
    return replace(
        base, qk_norm="head", qk_norm_kind=base.norm, ropes=ropes, windows=windows_of(types, read_window(config))
    )


FAMILY = Family("gemma3_text", "Gemma3Text", arch, gemma2.names)
