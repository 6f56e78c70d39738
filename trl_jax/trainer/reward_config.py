"""RewardConfig."""

from dataclasses import dataclass

from trl_jax.config import rules
from trl_jax.config.arguments import arg
from trl_jax.config.base import BaseConfig, inherited
from trl_jax.config.shared import shared


@dataclass(repr=False)
class RewardConfig(BaseConfig):
    """The arguments of RewardTrainer, in TRL's names, defaults and positional order; our own come last."""

    _argument_group_name = "training"

    learning_rate: float = inherited("learning_rate", default=1e-4, help="Peak learning rate.")
    label_names: list[str] | None = inherited("label_names", how="warned", why="preference pairs have no labels.")
    label_smoothing_factor: float = inherited(
        "label_smoothing_factor", how="warned", why="preference pairs have no labels to smooth."
    )

    chat_template_path: str | None = shared("chat_template_path")
    disable_dropout: bool = shared("disable_dropout")

    dataset_num_proc: int | None = shared("dataset_num_proc")
    eos_token: str | None = shared("eos_token")
    max_length: int | None = shared(
        "max_length",
        help="Maximum length of a text in tokens; pairs with a longer text are dropped. None keeps all pairs.",
    )
    pad_to_multiple_of: int | str | None = shared("pad_to_multiple_of")

    center_rewards_coefficient: float | None = arg(
        None,
        help="Weight of the mean squared sum of a pair's two scores, an auxiliary loss that keeps the "
        "mean score near zero (https://huggingface.co/papers/2312.09244, equation 2); 0.01 is common.",
        rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32),
    )
    activation_offloading: bool = shared("activation_offloading")

    pad_token: str | None = shared("pad_token")
    # Not in TRL; keyword-only.
    eval_report: bool = arg(
        False,
        help="In evaluation, also log the calibration error (eval_ece) and the accuracy of each subset "
        "(eval_accuracy_SUBSET, and their mean eval_accuracy_of_subsets), and plot the margins in "
        "output_dir/eval_margins.svg.",
        kw_only=True,
    )
    eval_subset_column: str = arg(
        "subset", help="Column with the name of a pair's subset, for eval_report.", rule=rules.text(), kw_only=True
    )
