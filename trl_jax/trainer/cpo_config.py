"""CPOConfig: the arguments of contrastive preference optimisation."""

from dataclasses import dataclass, field

from trl_jax.config.tables import CPO, CPO_LOSSES
from trl_jax.trainer.orpo_config import ReferenceFreeConfig


@dataclass(repr=False)
class CPOConfig(ReferenceFreeConfig):
    """The arguments of CPOTrainer, in TRL's names and defaults; our own come last.

    Besides the fields of `trainer.shared.reference_free_config.ReferenceFreeConfig`, which both have:

        beta: the factor of the difference of two answers' scores; tau of "ipo".
        label_smoothing: the probability that a preference is the wrong way round, of "sigmoid" and "simpo".
        loss_type: "sigmoid", "hinge", "ipo", "simpo", or "alphapo", which is "simpo" with cpo_alpha=0.0;
            `trl_jax.losses.reference_free` has their formulas.
        cpo_alpha: the factor of the chosen answers' negative log-likelihood.
        simpo_gamma: the margin that "simpo" asks for.
        alpha: of AlphaPO's scores; 0.0 takes log-probabilities.
    """

    argument_table = CPO

    beta: float = field(default=0.1, metadata={"help": "Factor of the difference of two answers' scores."})
    label_smoothing: float = field(
        default=0.0,
        metadata={"help": "Probability that a preference is the wrong way round, of 'sigmoid' and 'simpo'."},
    )
    loss_type: str = field(default="sigmoid", metadata={"help": "Loss of a pair.", "choices": list(CPO_LOSSES)})
    cpo_alpha: float = field(default=1.0, metadata={"help": "Factor of the chosen answers' negative log-likelihood."})
    simpo_gamma: float = field(default=0.5, metadata={"help": "Margin that 'simpo' asks for."})
    alpha: float = field(default=0.0, metadata={"help": "Alpha of AlphaPO's scores; 0 takes log-probabilities."})

    def __post_init__(self):
        if self.loss_type == "alphapo":
            self.loss_type, self.cpo_alpha = "simpo", 0.0
        super().__post_init__()
