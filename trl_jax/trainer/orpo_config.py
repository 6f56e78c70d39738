"""ORPOConfig: the arguments of odds ratio preference optimisation."""

from dataclasses import dataclass, field

from trl_jax.core.arguments.tables.reference_free import ORPO
from trl_jax.trainer.shared.reference_free_config import ReferenceFreeConfig


@dataclass(repr=False)
class ORPOConfig(ReferenceFreeConfig):
    """The arguments of ORPOTrainer, in TRL's names and defaults; our own come last.

    Besides the fields of `trainer.shared.reference_free_config.ReferenceFreeConfig`, which both have:

        beta: the factor of the odds ratio beside the negative log-likelihood, lambda in the paper.
    """

    argument_table = ORPO

    beta: float = field(
        default=0.1, metadata={"help": "Factor of the odds ratio beside the negative log-likelihood."}
    )
