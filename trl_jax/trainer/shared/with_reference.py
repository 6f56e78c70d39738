"""The base of trainers that compare a policy with a reference model: DPO and KTO."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, ClassVar

from datasets import Dataset

from trl_jax.run import construction
from trl_jax.run.model.precompute import precomputed
from trl_jax.run.model.routers import balance_experts
from trl_jax.run.state import RunState
from trl_jax.trainer.base_trainer import BaseTrainer
from trl_jax.trainer.shared.held_reference import HeldReference
from trl_jax.trainer.shared.refusals import NEVER_CALLED_WITH_REFERENCE, ONCE_CALLED_WITH_REFERENCE, check_lengths


class TrainerWithReference(HeldReference, BaseTrainer):
    """A trainer of language models whose task has the reference's log-probabilities, of every text, as the optional
    columns of numbers: they are computed in the step, or before training with `precompute_ref_log_probs`.
    """

    _never_called, _once_called = NEVER_CALLED_WITH_REFERENCE, ONCE_CALLED_WITH_REFERENCE
    _changes_logps: ClassVar[tuple[str, ...]] = ()  # attributes by which a text's log-probability is another

    def __init__(self, model: Any, ref_model: Any, *, peft_config: Any, **arguments: Any):
        """`arguments` are those of `BaseTrainer`."""
        if ref_model is not None and ref_model is model and not isinstance(model, str | os.PathLike):
            raise ValueError(
                "`model` and `ref_model` cannot be the same object. In most cases you should omit `ref_model`: the "
                "model as it is before training is then the reference."
            )
        self._given_reference, self._fresh_adapter = ref_model, peft_config is not None
        super().__init__(model, peft_config=peft_config, reference=self._attach_reference, **arguments)
        check_lengths(self.data_collator, self.args)
        if self.args.precompute_ref_log_probs:
            self._precompute()

    def _balance_experts(self) -> None:
        balance_experts(self._run, self.args.router_aux_loss_coef)

    def _attach_reference(self, run: RunState) -> None:
        if run.args.precompute_ref_log_probs:
            run.finish_rows = self._with_reference
        else:
            self._hold_reference(run)

    def _precompute(self) -> None:
        """Give all datasets the reference's log-probabilities; later ones get them when they are prepared."""
        run = self._run
        run.train_dataset = self._with_reference(run.train_dataset, "train")
        if isinstance(run.eval_dataset, dict):
            run.eval_dataset = {name: self._with_reference(part, name) for name, part in run.eval_dataset.items()}
        elif run.eval_dataset is not None:
            run.eval_dataset = self._with_reference(run.eval_dataset, "eval")

    def _with_reference(self, dataset: Dataset, name: str) -> Dataset:
        run, args, reference = self._run, self.args, self._reference(self._run)
        if run.state.global_step and self._given_reference is None and reference.arrays:
            raise ValueError(
                "Cannot compute reference log-probs for a dataset passed to `evaluate()` after training has started, "
                "because `precompute_ref_log_probs=True` and no `ref_model` was provided: the model as it was is not "
                "kept. Pass this dataset as `eval_dataset` to the trainer, pass a `ref_model`, or set "
                "`precompute_ref_log_probs=False`."
            )
        own = args.per_device_train_batch_size if name == "train" else args.per_device_eval_batch_size
        batch_size, columns = args.precompute_ref_batch_size or own, run.task.columns.optional
        comparing = dataclasses.replace(run, assembled=False)  # a set-up of its own, whose passes have the reference
        construction.attach_reference(comparing, reference)
        facts = {name: getattr(self, name) for name in self._changes_logps}
        options = {"batch_size": batch_size, "name": name, "facts": facts}
        return precomputed(comparing, dataset, columns, **options)
