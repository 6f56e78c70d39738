"""CPOConfig: the arguments of contrastive preference optimization."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trl_jax.config import rules
from trl_jax.config.arguments import arg
from trl_jax.core.trainers import CPO_LOSSES
from trl_jax.trainer.orpo_config import ReferenceFreeConfig

_any_number = rules.number(-rules.MOST_FLOAT32, most=rules.MOST_FLOAT32)


def _loss_type(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value == "kto_pair":
        return "Support for kto_pair has been removed in CPOTrainer. Please use KTOTrainer."
    return None if value in CPO_LOSSES else f"Unknown loss type: {value}. Should be one of {list(CPO_LOSSES)}"


def _unsmoothed(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if values["loss_type"] not in ("hinge", "ipo"):
        return None
    return f"label_smoothing={value} has no effect with loss_type={values['loss_type']!r}. Set it to 0.0."


@dataclass(repr=False)
class CPOConfig(ReferenceFreeConfig):
    """The arguments of CPOTrainer, in TRL's names and defaults; our own come last."""

    beta: float = arg(
        0.1,
        help="Scale of the difference between the chosen and the rejected completion's score; tau of 'ipo'.",
        rule=rules.number(1e-9, most=rules.MOST_FLOAT32),
    )
    label_smoothing: float = arg(
        0.0,
        help="Probability that a preference label is flipped, for 'sigmoid' and 'simpo'.",
        rule=rules.number(0, most=1.0),
        note=_unsmoothed,
    )
    loss_type: str = arg(
        "sigmoid",
        help="The loss; 'alphapo' is 'simpo' with cpo_alpha=0.0. For the formulas, see trl_jax.losses.reference_free.",
        choices=CPO_LOSSES,
        rule=_loss_type,
    )
    cpo_alpha: float = arg(
        1.0,
        help="Weight of the negative log-likelihood of the chosen completions.",
        rule=rules.number(0, most=rules.MOST_FLOAT32),
    )
    simpo_gamma: float = arg(0.5, help="Target reward margin of 'simpo'.", rule=_any_number)
    alpha: float = arg(0.0, help="Alpha of AlphaPO's scores; 0 uses plain log-probabilities.", rule=_any_number)

    def __post_init__(self):
        if self.loss_type == "alphapo":
            self.loss_type, self.cpo_alpha = "simpo", 0.0
        super().__post_init__()
