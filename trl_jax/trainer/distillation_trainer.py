"""On-policy distillation: TRL's DistillationTrainer on JAX."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from datasets import Dataset, IterableDataset
from transformers.trainer_callback import TrainerCallback

from trl_jax.config.base import BaseConfig
from trl_jax.hub.native_backend import NativeBackend
from trl_jax.hub.peft_backend import LoraBackend
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.legacy.arguments import accepting_old_keywords, as_config
from trl_jax.tasks.distillation import DistillationTask
from trl_jax.tasks.task import Task
from trl_jax.trainer.distillation_config import DistillationConfig
from trl_jax.trainer.online import RolloutTrainer, argument
from trl_jax.trainer.overrides import NEVER_CALLED_WITH_TEACHER
from trl_jax.training import model
from trl_jax.training.reference import ReferenceModel, given
from trl_jax.training.setup import Policy


class DistillationTrainer(RolloutTrainer):
    """Trains a language model, the student, to match the predictions of another one, the teacher, on each token of the
    student's own completions (On-Policy Distillation of Language Models, https://huggingface.co/papers/2306.13649).

    The arguments are TRL's, in TRL's order.

    Args:
        model: the student: a checkpoint's folder or Hub name, a model that `trl_jax.AutoModelForCausalLM` loaded, or a
            torch model of transformers, which receives the trained weights after `train()`.
        teacher_model: the teacher, in the same forms, with the student's vocabulary. Its weights keep the dtype in
            which they are stored.
        args: a DistillationConfig; None means `DistillationConfig("<model>-Distillation")`.
        train_dataset: rows with a `prompt`, a text or messages.
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; loaded with the student if None.
        callbacks: transformers callbacks, in addition to the default ones.
        optimizers: an optax transformation that includes its learning rate, and None or a function of the step.
        quantization_config: loads the student's base model under an adapter in 4 or 8 bits (QLoRA).
        peft_config: our or peft's LoraConfig.
        tools: functions that the student may call by name in its completions; annotations and docstrings describe them.
            What a call returns or raises becomes the next message, which is not trained on, and the student continues.
    """

    _name, _tag_names = "Distillation", ["trl", "distillation"]
    _paper = (
        "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
        "2306.13649",
    )
    config_class, _never_called = DistillationConfig, NEVER_CALLED_WITH_TEACHER
    max_tool_calling_iterations = argument("max_tool_calling_iterations")

    @accepting_old_keywords()
    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel,
        teacher_model: str | os.PathLike | PreTrainedModel | None = None,
        args: DistillationConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable] | None = None,
    ):
        if teacher_model is None:
            raise ValueError(
                "teacher_model is missing: pass a checkpoint's folder or Hub name, or a loaded model, of the student's "
                "vocabulary. args.teacher_model_name_or_path is read by the command `trl-jax distillation` alone."
            )
        self.tools, self._teacher = list(tools or ()), teacher_model
        if any(inspect.iscoroutinefunction(tool) for tool in self.tools):
            raise ValueError("Async tools are not yet supported by `DistillationTrainer`. Pass synchronous tools.")
        super().__init__(
            model, args=None if args is None else as_config(args, DistillationConfig), train_dataset=train_dataset,
            eval_dataset=eval_dataset, processing_class=processing_class, callbacks=callbacks, optimizers=optimizers,
            quantization_config=quantization_config, peft_config=peft_config,
        )  # fmt: skip

    @property
    def teacher_model(self) -> PreTrainedModel:
        """The teacher, with the student's tokenizer."""
        return self._setup.reference.as_model(self.model)

    def make_task(self) -> DistillationTask:
        return DistillationTask(**self._of_any_rollout(), beta=self.args.beta)

    def _reference(self, args: BaseConfig, task: Task, policy: Policy) -> ReferenceModel:
        del task
        if not isinstance(policy.model.backend, NativeBackend | LoraBackend):
            raise ValueError(
                "Prompt-learning PEFT methods (PromptTuning, PrefixTuning, P-Tuning) are not supported. Use a "
                "weight-based adapter such as LoRA instead."
            )
        loaded = model.load_teacher(
            self._teacher, args, args.teacher_model_init_kwargs, args.teacher_model_revision, images=policy.has_tower
        )
        model.check_teacher(loaded, policy.model, "Distillation")
        return given(loaded, policy.vocab_size, as_bits=policy.sharding_plan is None)
