"""olmo3: olmo2 with a window in three of four layers, and another rope in these."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, SLIDING, ConfigReader, read_layer_types, read_ropes, read_window, windows_of
from trl_jax.hub.families import Family, olmo2
from trl_jax.models.arch import Arch


def arch(config: ConfigReader) -> Arch:
    layers = config.size("num_hidden_layers", maximum=4096)
    types = read_layer_types(config, [SLIDING if (i + 1) % 4 else FULL for i in range(layers)])
    ropes = read_ropes(config, types, local_theta=500_000.0)  # regardless of rope_theta
    base = olmo2.arch(config.with_values(rope_parameters=None, rope_scaling=None))
    return replace(base, ropes=ropes, windows=windows_of(types, read_window(config)))


FAMILY = Family("olmo3", "Olmo3", arch, olmo2.names)
