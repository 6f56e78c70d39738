"""Kahneman-Tversky optimization of language models: TRL's KTOTrainer on JAX."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from datasets import Dataset, IterableDataset
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import EvalPrediction

from trl_jax.data.batch import IGNORED
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.torch_bridge import any_tensor
from trl_jax.losses.kto import UnpairedLoss
from trl_jax.tasks.kto import KtoTask
from trl_jax.trainer.arguments import InitOnlyAttribute, MirroredArg, accepting_old_keywords, as_config
from trl_jax.trainer.collators import (
    AcceptedCollators,
    DataCollatorForUnpairedPreference,
    DataCollatorForVisionUnpairedPreference,
)
from trl_jax.trainer.kto_config import KTOConfig
from trl_jax.trainer.overrides import REFUSED_IN_PREFERENCES
from trl_jax.trainer.reference import ReferenceTrainer, check_image_arguments

_MOVED = (
    "beta", "dataset_num_proc", "desirable_weight", "disable_dropout", "loss_type", "max_length",
    "max_prompt_length", "model_init_kwargs", "precompute_ref_log_probs", "undesirable_weight",
)  # fmt: skip


class KTOTrainer(ReferenceTrainer):
    """Trains a language model on answers labeled as desirable or undesirable, relative to a reference model.

    The arguments are TRL's, in TRL's order.

    Args:
        model: a checkpoint's folder or Hub name, a model that `trl_jax.AutoModelForCausalLM` loaded, or a torch model
            of transformers, which receives the trained weights after `train()`. Weights are kept in float32 and saved
            in `args.model_init_kwargs["dtype"]` ("float32" by default).
        ref_model: the reference model, in the same forms. None: the model before training; with a new adapter, the
            model without it; with an adapter that the model already had, a copy of that adapter.
        args: a KTOConfig; None means `KTOConfig("<model>-KTO")`.
        data_collator: a DataCollatorForUnpairedPreference; only its `pad_to_multiple_of` is used; for rows with
            images a DataCollatorForVisionUnpairedPreference, whose options replace those of `args`.
        train_dataset: rows with `prompt`, `completion` and `label`, as text or as messages, or with `prompt_ids`,
            `completion_ids` and `label`, or pairs, `chosen` and `rejected` with or without `prompt`; a Dataset or an
            IterableDataset (with `max_steps`). Rows with `prompt`, `completion` and `label` may have `image` or
            `images`.
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

    _name, _tag_names = "KTO", ["trl", "kto"]
    _paper = "KTO: Model Alignment as Prospect Theoretic Optimization", "2402.01306"
    config_class = KTOConfig
    _traits = replace(
        ReferenceTrainer._traits,
        refused=REFUSED_IN_PREFERENCES,
        collators=AcceptedCollators(DataCollatorForUnpairedPreference, DataCollatorForVisionUnpairedPreference),
    )
    beta, loss_type, desirable_weight, undesirable_weight = (
        MirroredArg(), MirroredArg(), MirroredArg(), MirroredArg(),
    )  # fmt: skip
    calculate_KL = InitOnlyAttribute(
        lambda trainer: trainer._setup.task.objective.estimates_kl, "Set loss_type instead."
    )

    @accepting_old_keywords(*_MOVED)
    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel,
        ref_model: str | os.PathLike | PreTrainedModel | None = None,
        args: KTOConfig | None = None,
        data_collator: DataCollatorForUnpairedPreference | DataCollatorForVisionUnpairedPreference | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: Any = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ):
        args = None if args is None else as_config(args, KTOConfig)
        super().__init__(
            model, ref_model, args=args, data_collator=data_collator, train_dataset=train_dataset,
            eval_dataset=eval_dataset, processing_class=processing_class, compute_metrics=compute_metrics,
            callbacks=callbacks, optimizers=optimizers, quantization_config=quantization_config,
            peft_config=peft_config,
        )  # fmt: skip

    def _compute_kl_logps(self, model: Any, batch: dict[str, Any]) -> Any:
        """The log-probabilities `[B]` of completions paired with other rows' prompts, without gradient, for a
        user-defined loss. None if the loss type does not estimate the KL divergence."""
        if not self.calculate_KL:
            return None
        ids, counted = batch["KL_input_ids"], batch["KL_completion_mask"]
        outputs = model(
            input_ids=ids, attention_mask=batch["KL_attention_mask"], labels=ids * counted + IGNORED * (1 - counted),
            fused_lm_head=True, **{name: batch[name] for name in ("pixel_values",) if name in batch},
        )  # fmt: skip
        logps = outputs.log_probs.sum(-1)
        return logps.detach() if any_tensor(logps) else jax.lax.stop_gradient(logps)

    def _check_images(self) -> None:
        check_image_arguments(self.args)

    def make_task(self) -> KtoTask:
        args = self.args
        objective = UnpairedLoss(self.loss_type, self.beta, self.desirable_weight, self.undesirable_weight)
        if objective.estimates_kl:
            _check_batches(args)
        in_order = args.train_sampling_strategy == "sequential"
        batch_size = args.per_device_train_batch_size
        max_length = args.max_length
        if isinstance(self.data_collator, DataCollatorForVisionUnpairedPreference):
            max_length = self.data_collator.max_length
            if self.data_collator.calculate_kl != objective.estimates_kl:
                raise ValueError(
                    f"data_collator has calculate_kl={self.data_collator.calculate_kl}, and loss_type="
                    f"{self.loss_type!r} needs calculate_kl={objective.estimates_kl}. Pass that, or leave the collator "
                    "out."
                )
        return KtoTask(objective, max_length, batch_size, in_order, args.max_prompt_length)


def _check_batches(args: KTOConfig) -> None:
    """Raise ValueError if answers cannot be paired with another row's prompt in each batch."""
    if args.train_sampling_strategy != "sequential":
        raise ValueError(
            f"Loss type `'{args.loss_type}'` estimates the KL divergence term and requires "
            "`train_sampling_strategy='sequential'`, as each answer also answers the next row's prompt of its batch. "
            f"Got `train_sampling_strategy='{args.train_sampling_strategy}'`."
        )
    if args.per_device_train_batch_size <= 1:
        raise ValueError(
            "Actual (not effective) batch size must be > 1. KTO will not work properly because the KL term will be "
            f"equivalent to the implied reward. Found per_device_train_batch_size={args.per_device_train_batch_size}."
        )
