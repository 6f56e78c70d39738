"""How each field of RLOOConfig is handled."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from trl_jax.core.arguments import rules
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
    old = " Up to TRL 0.21 a single number counted with normalize_reward alone: leave it out."
    wanted = f"{show(name, value)}: wanted two numbers, the lower one first, as in (-10.0, 10.0), or None."
    return wanted + (old if isinstance(value, Real) else "")


def _beside_weights(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := rules.number(0, optional=True)(name, value, values):
        return problem
    if value is None or values["reward_weights"] is None:
        return None
    return (
        f"{show(name, value)} beside reward_weights: the penalty is one reward function more. Write it, with a weight "
        "of its own, and leave missing_eos_penalty out."
    )


RLOO: dict[str, Handling] = {
    **GENERATION,
    **without_sequence_axis("RLOOTrainer"),
    **whole_groups_only("RLOO"),
    **fields("normalize_advantages", "native"),
    **fields("reward_clip_range", "native", rule=_range),
    # Of TRL up to 0.21
    **fields("missing_eos_penalty", "native", rule=_beside_weights),
    **fields("total_episodes", "native", rule=rules.whole(1, optional=True)),
    **fields("reward_model_path sft_model_path sanity_check", "silent"),
}
