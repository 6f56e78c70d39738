"""The layers that see all of the text before them, and those that see a window of it."""

from __future__ import annotations

from trl_jax.hub.config.reader import ConfigReader

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def read_layer_types(config: ConfigReader, default: list[str]) -> list[str]:
    """`layer_types`, one of FULL and SLIDING for each layer."""
    types = config.names("layer_types") or default
    if len(types) != len(default) or set(types) - {FULL, SLIDING}:
        raise ValueError(
            f"{config.source}: layer_types has {len(types)} entries of {sorted(set(types))}, wanted {len(default)} of "
            f"{FULL} or {SLIDING}."
        )
    return types


def read_window(config: ConfigReader) -> int | None:
    """`sliding_window` in tokens; None where it is null, or absent and the model_type has no default."""
    return None if config.value("sliding_window") is None else config.size("sliding_window")


def windows_of(types: list[str], window: int | None) -> tuple[int | None, ...]:
    """A window for each layer."""
    return tuple(window if kind == SLIDING else None for kind in types)
