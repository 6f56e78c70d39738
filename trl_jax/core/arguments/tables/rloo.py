"""How each field of RLOOConfig is handled."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from trl_jax.core.arguments.table import Handling, fields
from trl_jax.core.arguments.tables.generation import GENERATION, whole_groups_only, without_sequence_axis
from trl_jax.core.arguments.values import show


def _range(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value is None:
        return None
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(end, Real) for end in value):
        least, most = value
        if least <= most:
            return None
    return f"{show(name, value)}: wanted two numbers, the lower one first, as in (-10.0, 10.0), or None."


RLOO: dict[str, Handling] = {
    **GENERATION,
    **without_sequence_axis("RLOOTrainer"),
    **whole_groups_only("RLOO"),
    **fields("normalize_advantages", "native"),
    **fields("reward_clip_range", "native", rule=_range),
}
