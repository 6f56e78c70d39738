"""Reward models from preference pairs: TRL's RewardTrainer on JAX."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import EvalPrediction

from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.tasks.eval_report import report
from trl_jax.tasks.reward import RewardTask
from trl_jax.trainer.base_trainer import BaseTrainer
from trl_jax.trainer.collators import RewardDataCollator as DataCollatorForPreference
from trl_jax.trainer.overrides import accepting_old_keywords, as_config
from trl_jax.trainer.reward_config import RewardConfig
from trl_jax.training.evaluate import Evaluated, MetricHooks

if TYPE_CHECKING:
    from trl_jax.legacy.collators import RewardDataCollatorWithPadding


class RewardTrainer(BaseTrainer):
    """Trains a sequence classifier with one label to score the chosen answer of each pair above the rejected one.

    The arguments are TRL's, in TRL's order.

    Args:
        model: a checkpoint's folder or Hub name, a model that `trl_jax.AutoModelForSequenceClassification` loaded (its
            config gets the tokenizer's pad token, and its params become the trained weights), or a torch model of
            transformers, which receives the trained weights after `train()`. Weights are kept in float32 and saved in
            `args.model_init_kwargs["dtype"]` ("float32" by default).
        args: a RewardConfig; None means `RewardConfig("<model>-Reward")`.
        train_dataset: pairs in any format that TRL accepts, a Dataset or an IterableDataset (with `max_steps`).
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; loaded with the model if None. Its pad token is set if it has none.
        compute_metrics: gets an EvalPrediction with all scores `[2N, 1]` and label_ids `()`.
        callbacks: transformers callbacks, in addition to the default ones.
        preprocess_logits_for_metrics: applied to each batch's scores `[2P, 1]`, with labels `()`.
        optimizers: an optax transformation that includes its learning rate, and None or a function of the step. The
            function scales the updates; without it, the schedule of `args` does, relative to its peak.
        optimizer_cls_and_kwargs: an optax factory, or a torch optimizer that has a counterpart, and its arguments.
        data_collator: a DataCollatorForPreference or early TRL's RewardDataCollatorWithPadding; only its
            `pad_to_multiple_of` is used.
        quantization_config: our or transformers' BitsAndBytesConfig, which loads the base model of an adapter in 4 or 8
            bits (QLoRA).
        peft_config: our or peft's LoraConfig: an adapter of the frozen model is trained, and only the adapter is saved.

    Raises:
        TypeError, ValueError: names the invalid argument, row or checkpoint.
    """

    _name, _tag_names = "Reward", ["trl", "reward-trainer"]
    config_class, _collator_class = RewardConfig, DataCollatorForPreference
    _older_collators = ("RewardDataCollatorWithPadding",)

    @accepting_old_keywords("max_length")
    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel,
        args: RewardConfig | None = None,
        data_collator: DataCollatorForPreference | RewardDataCollatorWithPadding | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: Any = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[np.ndarray, tuple], np.ndarray] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
    ):
        args = None if args is None else as_config(args, RewardConfig)
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class,
            compute_metrics, callbacks, optimizers, optimizer_cls_and_kwargs, preprocess_logits_for_metrics,
            quantization_config, peft_config,
        )  # fmt: skip

    def make_task(self) -> RewardTask:
        return RewardTask(self.args.center_rewards_coefficient)

    def _metric_hooks(self) -> MetricHooks:
        wanted = self._report if self.args.eval_report else None
        return MetricHooks(self.compute_metrics, self.preprocess_logits_for_metrics, wanted)

    def _report(self, evaluated: Evaluated, dataset: Any, prefix: str) -> dict[str, float]:
        """The additional metrics of `eval_report`, which TRL does not have."""
        args, task = self.args, self._setup.task
        batches = zip(evaluated.outputs, evaluated.num_examples, strict=True)
        scores = [task.predictions(*batch)[:, 0] for batch in batches]
        margins = np.concatenate([np.subtract(*np.split(batch, 2)) for batch in scores])
        subsets = None
        if isinstance(dataset, Dataset) and args.eval_subset_column in dataset.column_names:
            rows = [row for batch in evaluated.rows for row in batch]
            subsets = dataset[rows][args.eval_subset_column]
        return report(margins, subsets, prefix=prefix, folder=Path(args.output_dir))
