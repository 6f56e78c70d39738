"""Contrastive preference optimization of language models: TRL's CPOTrainer on JAX."""

from __future__ import annotations

from trl_jax.losses.reference_free import ContrastiveLoss
from trl_jax.tasks.reference_free import CpoTask
from trl_jax.trainer.arguments import MirroredArg
from trl_jax.trainer.cpo_config import CPOConfig
from trl_jax.trainer.reference import ReferenceFreeTrainer


class CPOTrainer(ReferenceFreeTrainer):
    """Trains a language model to prefer the chosen answer of each pair, without a reference model: CPO, SimPO and
    AlphaPO.

    Takes the arguments of `ReferenceFreeTrainer`, which are those of `trl.experimental.cpo`.
    """

    _name, _tag_names = "CPO", ["trl", "cpo"]
    _paper = (
        "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine Translation",
        "2401.08417",
    )
    config_class = CPOConfig
    beta, label_smoothing, loss_type = MirroredArg(), MirroredArg(), MirroredArg()
    cpo_alpha, alpha, simpo_gamma = MirroredArg(), MirroredArg(), MirroredArg()

    def make_task(self) -> CpoTask:
        objective = ContrastiveLoss(self.loss_type, self.beta, self.label_smoothing, self.simpo_gamma, self.alpha)
        return CpoTask(self.args.max_length, self.args.max_prompt_length, objective, self.cpo_alpha)
