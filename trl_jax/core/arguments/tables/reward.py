"""How each field of RewardConfig is handled."""

from __future__ import annotations

from trl_jax.core.arguments import rules
from trl_jax.core.arguments.table import Handling, fields
from trl_jax.core.arguments.tables.base import BASE, COMMON

REWARD: dict[str, Handling] = BASE | COMMON | {
    **fields("center_rewards_coefficient", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    **fields("label_smoothing_factor", "warned", "preference pairs have no labels to smooth."),
    **fields("label_names", "warned", "preference pairs have no labels."),
    # Not in TRL
    **fields("eval_report eval_subset_column", "native"),
}
