"""ministral: mistral with the window in some layers only."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, SLIDING, ConfigReader, read_layer_types, read_window, windows_of
from trl_jax.hub.families import Family, llama, mistral
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    base = mistral.arch(config)
    window = read_window(config)
    types = read_layer_types(config, [FULL if window is None else SLIDING] * base.num_layers)
    return replace(base, windows=windows_of(types, window))


FAMILY = Family("ministral", "Ministral", arch, llama.names)
