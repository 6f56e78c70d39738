"""exaone4: olmo2's block with q and k normed per head. If some layers have a window, only these have positions."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, SLIDING, ConfigReader, read_layer_types, read_window, windows_of
from trl_jax.hub.families import Family, llama, olmo
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config)
    window = read_window(config)
    pattern = config.size("sliding_window_pattern", 4, minimum=1 if window else 0)
    default = [SLIDING if window and (i + 1) % pattern else FULL for i in range(base.num_layers)]
    types = read_layer_types(config, default)
    ropes = base.ropes if window is None else tuple(base.ropes[0] if kind == SLIDING else None for kind in types)
    return replace(
        base,
        block="post",
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm="head",
        ropes=ropes,
        windows=windows_of(types, window),
    )


FAMILY = Family("exaone4", "Exaone4", arch, olmo.names_v2)
