"""ORPOConfig, and what it shares with CPOConfig."""

from dataclasses import dataclass

from trl_jax.config import rules
from trl_jax.config.arguments import arg
from trl_jax.config.base import BaseConfig, inherited
from trl_jax.config.shared import shared, warn_about_prompt_length

# The base config of trainers on preference pairs without a reference model.


@dataclass(repr=False)
class ReferenceFreeConfig(BaseConfig):
    """The arguments of trainers on preference pairs without a reference model, in TRL's names and defaults."""

    _argument_group_name = "training"

    learning_rate: float = inherited("learning_rate", default=1e-6, help="Peak learning rate.")
    label_names: list[str] | None = inherited(
        "label_names", how="warned", why="preference pairs have no column of labels."
    )
    label_smoothing_factor: float = inherited(
        "label_smoothing_factor", how="warned", why="preference losses have no labels of tokens to smooth."
    )

    max_length: int | None = shared("max_length")
    disable_dropout: bool = shared("disable_dropout")
    dataset_num_proc: int | None = shared("dataset_num_proc")
    pad_to_multiple_of: int | str | None = shared("pad_to_multiple_of")
    max_prompt_length: int | None = shared("max_prompt_length")
    chat_template_path: str | None = shared("chat_template_path", kw_only=True)

    def __post_init__(self):
        warn_about_prompt_length(self.max_prompt_length, self._frames_to_caller())
        super().__post_init__()


# Odds ratio preference optimization.


@dataclass(repr=False)
class ORPOConfig(ReferenceFreeConfig):
    """The arguments of ORPOTrainer, in TRL's names and defaults; our own come last."""

    beta: float = arg(
        0.1,
        help="Weight of the odds ratio loss, which is added to the negative log-likelihood (lambda in the paper).",
        rule=rules.number(1e-9, most=rules.MOST_FLOAT32),
    )
