"""How each field of RewardConfig is handled."""

from __future__ import annotations

from trl_jax.core.arguments import rules
from trl_jax.core.arguments.base import BASE
from trl_jax.core.arguments.table import Handling, handled

REWARD: dict[str, Handling] = BASE | {
    **handled("chat_template_path disable_dropout eos_token pad_token", "native"),
    **handled("dataset_num_proc", "native", rule=rules.whole(0, optional=True, most=rules.MOST_PROCESSES)),
    **handled("max_length", "native", rule=rules.whole(1, optional=True)),
    **handled("pad_to_multiple_of", "mapped", rule=rules.pad_multiple),
    **handled("center_rewards_coefficient", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    **handled("activation_offloading", "mapped", rule=rules.offloading),
    **handled("label_smoothing_factor", "warned", "preference pairs have no labels to smooth."),
    **handled("label_names", "warned", "preference pairs have no labels."),
    # Not in TRL
    **handled("eval_report eval_subset_column", "native"),
}
