"""qwen2: llama with biases on q, k and v, and a sliding window in some layers."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, SLIDING, ConfigReader, read_layer_types, windows_of
from trl_jax.hub.families import Family, llama
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config)
    windows = read_windows(config, base.num_layers)
    return replace(base, qkv_bias=True, o_bias=False, mlp_bias=False, windows=windows)


def read_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: from `layer_types`, or in all layers from `max_window_layers` on."""
    used = config.flag("use_sliding_window") and not config.is_null("sliding_window")
    first = config.size("max_window_layers", 28, minimum=0)
    default = [SLIDING if used and i >= first else FULL for i in range(num_layers)]
    types = read_layer_types(config, default)
    if SLIDING in types and not used:
        raise ValueError(
            f"{config.source}: layer_types names {SLIDING} but use_sliding_window is false or sliding_window null. "
            "Make them agree."
        )
    config.value("sliding_window")  # no effect without use_sliding_window
    return windows_of(types, config.size("sliding_window", 4096) if used else None)


FAMILY = Family("qwen2", "Qwen2", arch, llama.names)
