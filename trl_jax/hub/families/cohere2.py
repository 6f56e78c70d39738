"""cohere2: cohere with a window on three layers of four; the others do not know positions."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config.layer_types import FULL, SLIDING, read_layer_types, read_window, windows_of
from trl_jax.hub.config.reader import ConfigReader
from trl_jax.hub.families import Family, cohere, llama
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    base, pattern = cohere.arch(config), config.size("sliding_window_pattern", 4)
    types = read_layer_types(config, [SLIDING if (i + 1) % pattern else FULL for i in range(base.num_layers)])
    windows = windows_of(types, read_window(config))
    ropes = tuple(None if window is None else base.ropes[0] for window in windows)
    return replace(base, windows=windows, ropes=ropes)


FAMILY = Family("cohere2", "Cohere2", arch, llama.names, in_transformers=False)
