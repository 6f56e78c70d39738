"""The base of trainers on preference pairs without a reference: ORPO and CPO."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from datasets import Dataset, IterableDataset
from transformers.trainer_callback import TrainerCallback

from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.run.arguments.base_config import BaseConfig
from trl_jax.run.model.routers import balance_experts
from trl_jax.trainer.base_trainer import BaseTrainer
from trl_jax.trainer.shared.old_keywords import accepting_old_keywords, as_config
from trl_jax.trainer.shared.refusals import refuse


class ReferenceFreeTrainer(BaseTrainer):
    """A trainer of language models on preference pairs.

    The arguments are those of TRL's trainers in `trl.experimental`, in their order.

    Args:
        model: a checkpoint's folder or Hub name, or what `trl_jax.AutoModelForCausalLM` loaded, or a torch model of
            transformers, which has the trained weights after `train()`. Weights are kept in float32;
            `args.model_init_kwargs["dtype"]` ("float32" unless set) is what they are saved in.
        args: a `config_class`; None means one with the output directory "<model>-<name>".
        train_dataset: pairs, `chosen` and `rejected` with or without `prompt`, as text or as messages; a Dataset or an
            IterableDataset (with `max_steps`).
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; loaded with the model if None. Its pad token is set if it has none.
        callbacks: transformers' callbacks, besides the default ones.
        optimizers: an optax transformation with its rate, and None or a function of the step. The function scales
            what the transformation gives; without it the arguments' schedule does, as a share of its peak.
        peft_config: a LoraConfig, or a config of virtual tokens, of ours or of peft's: an adapter trains beside the
            frozen model, and is what is saved.
        quantization_config: a BitsAndBytesConfig of ours or of transformers': the weights beside an adapter are held in
            4 or 8 bits.
        data_collator, model_init, preprocess_logits_for_metrics, compute_metrics: not None is refused. (TRL hands a
            compute_metrics two means a batch.)

    Raises:
        TypeError, ValueError: an argument, row or checkpoint at fault, by name.
    """

    @accepting_old_keywords()
    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel | None = None,
        args: BaseConfig | None = None,
        data_collator: None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: Any = None,
        model_init: None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: None = None,
        peft_config: Any = None,
        compute_metrics: Callable | None = None,
        *,
        quantization_config: Any = None,
    ):
        refuse(
            data_collator=data_collator, model_init=model_init, compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )  # fmt: skip
        super().__init__(
            model, None if args is None else as_config(args, self.config_class), None, train_dataset, eval_dataset,
            processing_class, callbacks=callbacks, optimizers=optimizers,
            quantization_config=quantization_config, peft_config=peft_config,
        )  # fmt: skip

    def _balance_experts(self) -> None:
        """As in TRL, by the model's config alone: where it has `output_router_logits`, by its coefficient."""
        asked = self._run.model.config.get_text_config().to_dict().get("output_router_logits", False)
        balance_experts(self._run, None if asked else 0.0)
