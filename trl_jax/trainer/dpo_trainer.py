"""Direct preference optimisation of language models: TRL's DPOTrainer on JAX."""

from __future__ import annotations

import os
from typing import Any

from datasets import Dataset, IterableDataset
from transformers.trainer_callback import TrainerCallback

from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.losses.dpo import PreferenceLoss
from trl_jax.run import construction
from trl_jax.run.model import loading as model_loading
from trl_jax.run.model.precompute import precomputed
from trl_jax.run.model.reference import ReferenceModel, given, initial_policy
from trl_jax.run.model.routers import balance_experts
from trl_jax.run.state import OWN_LOSS, RunState
from trl_jax.tasks.dpo import REFERENCE_COLUMNS, DpoTask
from trl_jax.trainer.base_trainer import BaseTrainer
from trl_jax.trainer.dpo_config import DPOConfig
from trl_jax.trainer.old_keywords import accepting_old_keywords, as_config
from trl_jax.trainer.refusals import names_of_script

_MOVED = (
    "beta", "dataset_num_proc", "disable_dropout", "f_alpha_divergence_coef", "f_divergence_type", "label_smoothing",
    "loss_type", "max_length", "model_init_kwargs", "precompute_ref_log_probs", "truncation_mode",
)  # fmt: skip


class DPOTrainer(BaseTrainer):
    """Trains a language model to prefer the chosen answer of each pair, as compared with a reference model.

    The arguments are TRL's, in TRL's order.

    Args:
        model: a checkpoint's folder or Hub name, or what `trl_jax.AutoModelForCausalLM` loaded, or a torch model of
            transformers, which has the trained weights after `train()`. Weights are kept in float32;
            `args.model_init_kwargs["dtype"]` ("float32" unless set) is what they are saved in.
        ref_model: the same, of the reference. None: the model as it is before training; under a new adapter the model
            without it, under one that the model has a copy of that.
        args: a DPOConfig; None means `DPOConfig("<model>-DPO")`.
        data_collator: refused; rows are padded by `pad_to_multiple_of`.
        train_dataset: pairs, `chosen` and `rejected` with or without `prompt`, as text or as messages, or
            `prompt_ids`, `chosen_ids` and `rejected_ids`; a Dataset or an IterableDataset (with `max_steps`).
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; loaded with the model if None. Its pad token is set if it has none.
        compute_metrics: refused: TRL's own metrics need no logits.
        callbacks: transformers' callbacks, besides the default ones.
        optimizers: an optax transformation with its rate, and None or a function of the step. The function scales
            what the transformation gives; without it the arguments' schedule does, as a share of its peak.
        quantization_config: a BitsAndBytesConfig of ours or of transformers': the weights beside an adapter are held in
            4 or 8 bits.
        peft_config: a LoraConfig of ours or of peft's: an adapter trains beside the frozen model, and is what is saved.

    Attributes:
        aux_loss_enabled: whether a loss that balances experts is added.

    Raises:
        TypeError, ValueError: an argument, row or checkpoint at fault, by name.
    """

    _name, _tag_names = "DPO", ["dpo"]
    config_class = DPOConfig

    @accepting_old_keywords(*_MOVED)
    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel,
        ref_model: str | os.PathLike | PreTrainedModel | None = None,
        args: DPOConfig | None = None,
        data_collator: None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: Any = None,
        compute_metrics: None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ):
        if ref_model is not None and ref_model is model and not isinstance(model, str | os.PathLike):
            raise ValueError(
                "`model` and `ref_model` cannot be the same object. In most cases you should omit `ref_model`: the "
                "model as it is before training is then the reference."
            )
        _check_own(type(self), compute_metrics)
        self.ref_model, self._fresh_adapter = ref_model, peft_config is not None
        super().__init__(
            model,
            None if args is None else as_config(args, DPOConfig),
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            compute_metrics,
            callbacks,
            optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            reference=self._attach_reference,
        )
        if self.args.precompute_ref_log_probs:
            self._precompute()
        self.aux_loss_enabled = balance_experts(self._run, self.args.router_aux_loss_coef)

    def make_task(self) -> DpoTask:
        args = self.args
        objective = PreferenceLoss(
            tuple(args.loss_type),
            tuple(args.loss_weights or [1.0] * len(args.loss_type)),
            args.beta,
            args.f_divergence_type,
            args.f_alpha_divergence_coef,
            args.label_smoothing,
            args.discopop_tau,
            args.use_weighting,
        )
        return DpoTask(objective, args.ld_alpha, args.max_length, args.truncation_mode)

    def _attach_reference(self, run: RunState) -> None:
        if not run.args.precompute_ref_log_probs:
            construction.attach_reference(run, self._reference(run))

    def _reference(self, run: RunState) -> ReferenceModel:
        if self.ref_model is None:
            return initial_policy(run.model, fresh_adapter=self._fresh_adapter)
        return given(model_loading.beside(self.ref_model, run.args), run.vocab_size)

    def _precompute(self) -> None:
        """Give all datasets the reference's log-probabilities; later ones get them when they are prepared."""
        run = self._run
        run.train_dataset = self._with_reference(run.train_dataset, "train")
        if isinstance(run.eval_dataset, dict):
            run.eval_dataset = {name: self._with_reference(part, name) for name, part in run.eval_dataset.items()}
        elif run.eval_dataset is not None:
            run.eval_dataset = self._with_reference(run.eval_dataset, "eval")
        run.finish_rows = self._with_reference

    def _with_reference(self, dataset: Dataset, name: str) -> Dataset:
        run, args, reference = self._run, self.args, self._reference(self._run)
        if run.state.global_step and self.ref_model is None and reference.arrays:
            raise ValueError(
                "Cannot compute reference log-probs for a dataset passed to `evaluate()` after training has started, "
                "because `precompute_ref_log_probs=True` and no `ref_model` was provided: the model as it was is not "
                "kept. Pass this dataset as `eval_dataset` to the trainer, pass a `ref_model`, or set "
                "`precompute_ref_log_probs=False`."
            )
        own = args.per_device_train_batch_size if name == "train" else args.per_device_eval_batch_size
        batch_size = args.precompute_ref_batch_size or own
        construction.attach_reference(run, reference)
        try:
            return precomputed(run, self.parts.forward, dataset, REFERENCE_COLUMNS, batch_size=batch_size, name=name)
        finally:
            run.reference = None


def _check_own(kind: type, compute_metrics: Any) -> None:
    """Raise ValueError for metrics of logits, TypeError for a script's own loss: neither is in this release."""
    if compute_metrics is not None:
        raise ValueError(
            "compute_metrics is not in this release of trl_jax for DPO, as it asks for all logits. Leave it out: "
            "evaluate() has rewards, accuracies, margins, log-probabilities and entropy."
        )
    if own := sorted(names_of_script(kind) & OWN_LOSS):
        raise TypeError(
            f"{kind.__name__} overrides {', '.join(own)}, which is not in this release of trl_jax for DPO. Choose a "
            "loss_type, or several with loss_weights."
        )
