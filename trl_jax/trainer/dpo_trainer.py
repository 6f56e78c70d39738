"""Direct preference optimization of language models: TRL's DPOTrainer on JAX."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from datasets import Dataset, IterableDataset
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import EvalPrediction

from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.losses.dpo import PreferenceLoss
from trl_jax.tasks.dpo import DpoTask
from trl_jax.trainer.arguments import MirroredArg, accepting_old_keywords, as_config
from trl_jax.trainer.collators import AcceptedCollators, DataCollatorForPreference, DataCollatorForVisionPreference
from trl_jax.trainer.dpo_config import DPOConfig, losses_of
from trl_jax.trainer.overrides import REFUSED_IN_PREFERENCES
from trl_jax.trainer.reference import ReferenceTrainer, check_image_arguments

_MOVED = (
    "beta", "dataset_num_proc", "disable_dropout", "f_alpha_divergence_coef", "f_divergence_type", "label_smoothing",
    "loss_type", "max_length", "max_prompt_length", "model_init_kwargs", "precompute_ref_log_probs", "truncation_mode",
)  # fmt: skip


class DPOTrainer(ReferenceTrainer):
    """Trains a language model to prefer the chosen answer of each pair, relative to a reference model.

    The arguments are TRL's, in TRL's order.

    Args:
        model: a checkpoint's folder or Hub name, a model that `trl_jax.AutoModelForCausalLM` loaded, or a torch model
            of transformers, which receives the trained weights after `train()`. Weights are kept in float32 and saved
            in `args.model_init_kwargs["dtype"]` ("float32" by default).
        ref_model: the reference model, in the same forms. None: the model before training; with a new adapter, the
            model without it; with an adapter that the model already had, a copy of that adapter.
        args: a DPOConfig; None means `DPOConfig("<model>-DPO")`.
        data_collator: a DataCollatorForPreference; only its `pad_to_multiple_of` is used; for rows with images a
            DataCollatorForVisionPreference, whose options replace those of `args`.
        train_dataset: pairs, `chosen` and `rejected` with or without `prompt`, as text or as messages, or
            `prompt_ids`, `chosen_ids` and `rejected_ids`; a Dataset or an IterableDataset (with `max_steps`).
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; loaded with the model if None. Its pad token is set if it has none.
        compute_metrics: gets an EvalPrediction with all logits `[rows, T, V]`, not shifted, and their token ids
            `[rows, T]`. TRL plans to drop it; the trainer's own metrics need no logits.
        callbacks: transformers callbacks, in addition to the default ones.
        optimizers: an optax transformation that includes its learning rate, and None or a function of the step. The
            function scales the updates; without it, the schedule of `args` does, relative to its peak.
        quantization_config: our or transformers' BitsAndBytesConfig, which loads the base model of an adapter in 4 or 8
            bits (QLoRA).
        peft_config: our or peft's LoraConfig or prompt-learning config: an adapter of the frozen model is trained, and
            only the adapter is saved.

    Raises:
        TypeError, ValueError: names the invalid argument, row or checkpoint.
    """

    _name, _tag_names = "DPO", ["trl", "dpo"]
    _paper = "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", "2305.18290"
    config_class = DPOConfig
    _traits = replace(
        ReferenceTrainer._traits,
        refused=REFUSED_IN_PREFERENCES,
        collators=AcceptedCollators(DataCollatorForPreference, DataCollatorForVisionPreference),
    )
    _changes_logps = ("ld_alpha",)
    beta, ld_alpha, label_smoothing = MirroredArg(), MirroredArg(), MirroredArg()
    f_divergence_type, f_alpha_divergence_coef, use_weighting = MirroredArg(), MirroredArg(), MirroredArg()
    loss_types = MirroredArg("loss_type", lambda args: losses_of(args.loss_type))
    loss_weights = MirroredArg("loss_weights", lambda args: args.loss_weights or [1.0] * len(losses_of(args.loss_type)))

    @accepting_old_keywords(*_MOVED)
    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel,
        ref_model: str | os.PathLike | PreTrainedModel | None = None,
        args: DPOConfig | None = None,
        data_collator: DataCollatorForPreference | DataCollatorForVisionPreference | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: Any = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ):
        args = None if args is None else as_config(args, DPOConfig)
        super().__init__(
            model, ref_model, args=args, data_collator=data_collator, train_dataset=train_dataset,
            eval_dataset=eval_dataset, processing_class=processing_class, compute_metrics=compute_metrics,
            callbacks=callbacks, optimizers=optimizers, quantization_config=quantization_config,
            peft_config=peft_config,
        )  # fmt: skip

    def _check_images(self) -> None:
        if self.args.max_length is not None and self.args.truncation_mode == "keep_end":
            raise ValueError(
                "truncation_mode='keep_end' is not supported for vision-language models. Image tokens reside inside "
                "the prompt portion of the sequence: use truncation_mode='keep_start' (the default) or set "
                "max_length=None."
            )
        check_image_arguments(self.args)

    def make_task(self) -> DpoTask:
        args = self.args
        objective = PreferenceLoss(
            tuple(losses_of(self.loss_types)),
            tuple(self.loss_weights),
            self.beta,
            self.f_divergence_type,
            self.f_alpha_divergence_coef,
            self.label_smoothing,
            args.discopop_tau,
            self.use_weighting,
        )
        cuts = {name: vars(args)[name] for name in ("max_length", "truncation_mode", "max_prompt_length")}
        if isinstance(self.data_collator, DataCollatorForVisionPreference):
            cuts["max_length"] = self.data_collator.max_length
        return DpoTask(**cuts, objective=objective, ld_alpha=self.ld_alpha)
