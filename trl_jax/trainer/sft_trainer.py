"""Supervised fine-tuning of language models: TRL's SFTTrainer on JAX."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import EvalPrediction

from trl_jax.config.rules import as_dict
from trl_jax.data.checks import has_transform, materialize
from trl_jax.data.sft import ScriptCollator
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.tasks.sft import SftTask
from trl_jax.trainer.arguments import MirroredArg, accepting_old_keywords, as_config
from trl_jax.trainer.base_trainer import BaseTrainer
from trl_jax.trainer.collators import (
    NO_COLLATOR,
    AcceptedCollators,
    DataCollatorForLanguageModeling,
    DataCollatorForVisionLanguageModeling,
    is_older_collator,
)
from trl_jax.trainer.overrides import REFUSED, TrainerTraits
from trl_jax.trainer.sft_config import SFTConfig
from trl_jax.training.forward import balance_experts

if TYPE_CHECKING:
    from trl_jax.legacy.collators import DataCollatorForCompletionOnlyLM

logger = logging.getLogger(__name__)

_ONLY_ANSWERS = ("DataCollatorForCompletionOnlyLM",)
_SIGNATURE = ("input_ids", "labels", "seq_lengths")  # the columns that TRL leaves a collator

_MOVED = (
    "dataset_kwargs", "dataset_num_proc", "dataset_text_field", "eval_packing", "max_length", "max_seq_length",
    "model_init_kwargs", "neftune_noise_alpha", "packing",
)  # fmt: skip
_IMAGE_OPTIONS = (
    "assistant_only_loss", "chat_template", "completion_only_loss", "dataset_text_field", "max_length",
)  # fmt: skip
_ROW_OPTIONS = (
    "assistant_only_loss", "completion_only_loss", "dataset_text_field", "packing", "packing_strategy", "seed",
    "shuffle_dataset", "truncation_mode",
)  # fmt: skip


class SFTTrainer(BaseTrainer):
    """Fine-tunes a causal language model on texts, conversations, or prompts with completions.

    The arguments are TRL's, in TRL's order.

    Args:
        model: a checkpoint's folder or Hub name, a model that `trl_jax.AutoModelForCausalLM` loaded, or a torch model
            of transformers, which receives the trained weights after `train()`. Weights are kept in float32 and saved
            in `args.model_init_kwargs["dtype"]` ("float32" by default).
        args: an SFTConfig; None means `SFTConfig("<model>-SFT")`.
        data_collator: a DataCollatorForLanguageModeling, or transformers' DataCollatorForSeq2Seq, which gives the same
            batches: only its `pad_to_multiple_of` is used; for rows with images a
            DataCollatorForVisionLanguageModeling, whose options override `args`; or the
            DataCollatorForCompletionOnlyLM of early TRL releases, which trains only on the answers.
        train_dataset: rows with `text`, `messages`, `prompt` and `completion`, or `input_ids`; a Dataset or an
            IterableDataset (with `max_steps`).
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; loaded with the model if None. Its pad token is set if it has none.
        compute_loss_func: computes the loss in jax.numpy from the model's outputs, with `logits` `[rows, T, V]`, and
            the labels `[rows, T]`; `num_items_in_batch` is the number of targets in the whole step.
        compute_metrics: gets an EvalPrediction with all logits `[N, T, V]`, not shifted, and labels `[N, T]`.
        callbacks: transformers callbacks, in addition to the default ones.
        optimizers: an optax transformation that includes its learning rate, and None or a function of the step. The
            function scales the updates; without it, the schedule of `args` does, relative to its peak.
        optimizer_cls_and_kwargs: an optax factory, or a torch optimizer that has a counterpart, and its arguments.
        preprocess_logits_for_metrics: applied to each batch's logits and labels; its result replaces the logits.
        quantization_config: our or transformers' BitsAndBytesConfig, which loads the base model of an adapter in 4 or 8
            bits (QLoRA).
        peft_config: our or peft's LoraConfig or prompt-learning config: an adapter of the frozen model is trained, and
            only the adapter is saved.
        formatting_func: returns the text of a row.

    Raises:
        TypeError, ValueError: names the invalid argument, row or checkpoint.
    """

    _name, _tag_names = "SFT", ["trl", "sft"]
    config_class = SFTConfig
    _traits = TrainerTraits(
        refused=replace(
            REFUSED,
            never_read=REFUSED.never_read
            | {
                "label_smoother": "Set label_smoothing_factor in SFTConfig.",
                "model_accepts_loss_kwargs": (
                    "What the loss is divided by follows from the model type, as in transformers. To change that, "
                    "override compute_loss."
                ),
            },
        ),
        collators=AcceptedCollators(
            DataCollatorForLanguageModeling,
            DataCollatorForVisionLanguageModeling,
            older=(*_ONLY_ANSWERS, "DataCollatorForSeq2Seq"),
            calls_others=True,
        ),
    )
    _label_smoothing = MirroredArg("label_smoothing_factor")
    _formatting_func: Callable[[dict[str, Any]], str] | None = None
    _whole_texts: bool = False  # whether the training rows have no completions

    @accepting_old_keywords(*_MOVED)
    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel,
        args: SFTConfig | None = None,
        data_collator: DataCollatorForLanguageModeling
        | DataCollatorForVisionLanguageModeling
        | DataCollatorForCompletionOnlyLM
        | Callable[[list[dict[str, Any]]], Mapping[str, Any]]
        | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: Any = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[dict[str, Any]], str] | None = None,
    ):
        self._formatting_func = formatting_func
        self._whole_texts = not _has_completions(train_dataset)
        if args is not None:
            args = as_config(args, SFTConfig)
            _check_together(args, data_collator, compute_loss_func)
            if _skips(args):
                train_dataset, eval_dataset = materialize(train_dataset, "train"), materialize(eval_dataset, "eval")
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class,
            compute_metrics, callbacks, optimizers, optimizer_cls_and_kwargs, preprocess_logits_for_metrics,
            quantization_config, peft_config, compute_loss_func=compute_loss_func,
        )  # fmt: skip
        if self.aux_loss_enabled and compute_loss_func is not None:
            logger.warning(
                "compute_loss_func is the whole loss, as in TRL: the load-balancing loss of this mixture of experts is "
                "logged and not added. Add router_aux_loss_coef * outputs.aux_loss yourself, or pass "
                "router_aux_loss_coef=0.0."
            )

    def _check_images(self) -> None:
        args = self.args
        if self._calls_collator:
            raise ValueError(f"data_collator is the script's own. {NO_COLLATOR}")
        if args.packing:
            raise ValueError(
                "Packing is not supported for vision datasets. Please set `packing=False` in the SFTConfig."
            )
        if args.padding_free:
            raise ValueError(
                "Padding-free training is yet not supported for vision datasets. Please set `padding_free=False` in "
                "the `SFTConfig`."
            )
        if args.max_length is not None and args.truncation_mode == "keep_end":
            raise ValueError(
                "truncation_mode='keep_end' is not supported for vision datasets. Image tokens reside at the start of "
                "the text: use truncation_mode='keep_start' or set max_length=None."
            )
        if self._formatting_func is not None:
            raise ValueError("formatting_func is not supported for rows with images. Apply it to the dataset instead.")

    def _balance_experts(self, model: PreTrainedModel, args: SFTConfig) -> float:
        return balance_experts(model, args.router_aux_loss_coef, in_config=True)

    def _prepared_by_script(self, task: SftTask, dataset: Any, name: str) -> tuple[SftTask, Any]:
        if _skips(self.args):
            return task, dataset
        packing = self.args.packing if name == "train" or task.eval_packing is None else task.eval_packing
        rows = self._prepare_dataset(dataset, self.processing_class, self.args, packing, self._formatting_func, name)
        return replace(task, row_options={**task.row_options, "skip_prepare_dataset": True}), rows

    def _prepare_dataset(
        self,
        dataset: Any,
        processing_class: Any,
        args: SFTConfig,
        packing: bool,
        formatting_func: Callable | None,
        dataset_name: str,
    ) -> Any:
        """The tokenized rows, with TRL's columns. A script may override it and return its own rows.

        Raises:
            ValueError: `packing` or `formatting_func` differs from the trainer's.
        """
        expected = self.args.packing if dataset_name == "train" else packing
        if formatting_func is not self._formatting_func or packing != expected:
            raise ValueError(
                "super()._prepare_dataset got another packing or formatting_func than the trainer. Set packing and "
                "eval_packing in SFTConfig, and pass formatting_func to the constructor."
            )
        return super()._prepare_dataset(dataset, processing_class, args, dataset_name)

    def make_task(self) -> SftTask:
        args = self.args
        options = {name: vars(args)[name] for name in _ROW_OPTIONS}
        if args.completion_only_loss is None and self._whole_texts:
            options["completion_only_loss"] = False  # of evaluation sets, too, whatever their format
        options["skip_prepare_dataset"] = _skips(args)
        options["packing_parts"] = args.dataset_num_proc
        options["formatting_func"] = self._formatting_func
        if is_older_collator(self.data_collator, _ONLY_ANSWERS):
            options["answer_marks"] = self.data_collator.marks
        if self._calls_collator:
            columns = _SIGNATURE if args.remove_unused_columns else None
            options["collate"] = ScriptCollator(self.data_collator, args.per_device_train_batch_size, columns)
        task = SftTask(args.loss_type, self._label_smoothing, options, args.eval_packing, _is_padding_free(args))
        if isinstance(self.data_collator, DataCollatorForVisionLanguageModeling):
            task = replace(task, image_options={name: vars(self.data_collator)[name] for name in _IMAGE_OPTIONS})
        task = replace(task, image_options={**task.image_options, "keeps_columns": args.keeps_columns})
        return task


def _has_completions(dataset: Any) -> bool:
    """Whether the first row has a prompt and a completion."""
    if not isinstance(dataset, Dataset | IterableDataset):
        return False
    columns = None if has_transform(dataset) else dataset.column_names
    return {"prompt", "completion"} <= {*(columns or next(iter(dataset), {}))}


def _is_padding_free(args: SFTConfig) -> bool:
    return args.padding_free or (args.packing and args.packing_strategy != "wrapped")


def _skips(args: SFTConfig) -> bool:
    return bool(as_dict("dataset_kwargs", args.dataset_kwargs).get("skip_prepare_dataset"))


def _check_together(args: SFTConfig, data_collator: Any, compute_loss_func: Any) -> None:
    """Raise ValueError for incompatible arguments."""
    if data_collator is not None and _is_padding_free(args):
        raise ValueError("Passing a custom data collator is not supported when using padding-free.")
    if args.packing and SFTTrainer._traits.collators.calls(data_collator):
        raise ValueError(
            "packing=True: rows are packed before a collate function gets them. Leave data_collator out, or pass "
            "packing=False."
        )
    if args.packing and is_older_collator(data_collator, _ONLY_ANSWERS):
        raise ValueError(
            "You passed a `DataCollatorForCompletionOnlyLM` to the SFTTrainer. This is not compatible with the "
            "`packing` argument: rows of 'prompt' and 'completion' are packed with their labels."
        )
    if args.padding_free and not args.packing and args.max_length is not None and not _skips(args):
        raise ValueError(
            "When `padding_free=True` without packing, `max_length` is not enforced. Either enable packing (e.g., "
            "`packing=True, packing_strategy='bfd'`), provide already truncated inputs, or set `max_length=None`."
        )
    if args.loss_type == "dft" and compute_loss_func is not None:
        raise ValueError(
            "You passed a `compute_loss_func` together with `loss_type='dft'` to the `SFTTrainer`: either is "
            "the loss. Leave one out."
        )
