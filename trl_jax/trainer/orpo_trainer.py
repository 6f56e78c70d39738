"""Odds ratio preference optimization of language models: TRL's ORPOTrainer on JAX."""

from __future__ import annotations

from trl_jax.tasks.reference_free import OrpoTask
from trl_jax.trainer.arguments import MirroredArg
from trl_jax.trainer.orpo_config import ORPOConfig
from trl_jax.trainer.reference import ReferenceFreeTrainer


class ORPOTrainer(ReferenceFreeTrainer):
    """Fine-tunes a language model on the chosen texts of preference pairs while raising the odds of chosen over
    rejected answers, without a reference model.

    Takes the arguments of `ReferenceFreeTrainer`, which are those of `trl.experimental.orpo`.
    """

    _name, _tag_names = "ORPO", ["trl", "orpo"]
    _paper = "ORPO: Monolithic Preference Optimization without Reference Model", "2403.07691"
    config_class = ORPOConfig
    beta = MirroredArg()

    def make_task(self) -> OrpoTask:
        return OrpoTask(self.args.max_length, self.args.max_prompt_length, self.beta)
