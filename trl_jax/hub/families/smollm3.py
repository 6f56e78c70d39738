"""smollm3: llama without positions in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, SLIDING, ConfigReader, read_layer_types, read_window, windows_of
from trl_jax.hub.families import Family, llama
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    base = llama.arch(config)
    interval = config.size("no_rope_layer_interval", 4)
    turns = config.value("no_rope_layers")
    if turns is None:
        turns = [int((layer + 1) % interval != 0) for layer in range(base.num_layers)]
    if not isinstance(turns, list) or len(turns) != base.num_layers or set(turns) - {0, 1}:
        raise config.wrong("no_rope_layers", turns, f"{base.num_layers} entries, 1 for a layer with positions, else 0")
    window = read_window(config)
    window = window if config.flag("use_sliding_window") else None
    types = read_layer_types(config, [SLIDING if window and not turn else FULL for turn in turns])
    return replace(
        base,
        ropes=tuple(rope if turn else None for rope, turn in zip(base.ropes, turns, strict=True)),
        windows=windows_of(types, window),
    )


FAMILY = Family("smollm3", "SmolLM3", arch, llama.names)
