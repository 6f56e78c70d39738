"""On-policy distillation: TRL's DistillationTrainer on JAX."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from datasets import Dataset, IterableDataset
from transformers.trainer_callback import TrainerCallback

from trl_jax.config.base import BaseConfig
from trl_jax.hub.native_backend import NativeBackend
from trl_jax.hub.peft_backend import LoraBackend
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.tasks.distillation import DistillationTask, ScriptedDistillationTask, TokenDivergences
from trl_jax.tasks.task import Task
from trl_jax.trainer.arguments import InitOnlyArg, accepting_old_keywords, as_config
from trl_jax.trainer.distillation_config import DistillationConfig
from trl_jax.trainer.online import RolloutTrainer
from trl_jax.trainer.overrides import REFUSED_WITH_TEACHER, names_of_script
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
            The result or error of a call becomes the next message, which is not trained on, and the student continues.
        rollout_func: completes prompts instead of the student, as in `GRPOTrainer`. TRL's DistillationTrainer does not
            have this argument. Returned log-probabilities are not used.
    """

    _name, _tag_names = "Distillation", ["trl", "distillation"]
    _paper = (
        "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
        "2306.13649",
    )
    config_class = DistillationConfig
    _traits = replace(RolloutTrainer._traits, refused=REFUSED_WITH_TEACHER)
    max_tool_calling_iterations = InitOnlyArg()

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
        *,
        rollout_func: Callable | None = None,
    ):
        if tools and rollout_func is not None:
            raise ValueError(
                "tools= together with a rollout_func, which writes the completions: pass only one of them."
            )
        self.rollout_func = rollout_func
        if teacher_model is None:
            raise ValueError(
                "teacher_model is missing: pass a checkpoint's folder or Hub name, or a loaded model, of the student's "
                "vocabulary. Only the command `trl-jax distillation` reads args.teacher_model_name_or_path."
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

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: None,
        multimodal_fields: dict[str, Any],
        has_tool_images: bool = False,
    ) -> list[list[int]]:
        """One completion per prompt; a `rollout_func` may call it. `images` must be None; `multimodal_fields` and
        `has_tool_images` are ignored."""
        del multimodal_fields, has_tool_images
        return self._complete_once(prompt_ids, images, 1)[0]

    def make_task(self) -> DistillationTask:
        scripted = {"compute_loss", "_compute_loss"} & names_of_script(type(self))
        kind = ScriptedDistillationTask if scripted else DistillationTask
        return kind(**self._rollout_options(), beta=self.args.beta)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Call `_compute_loss` and log its entropy, as in TRL. Scripts may override either, in jax.numpy."""
        if self.model.training and inputs.get("num_items_in_batch") is not None:
            num_items_in_batch = jnp.maximum(inputs["num_items_in_batch"], 1) / self.accelerator.num_processes
        loss, entropy_sum, num_valid_tokens = self._compute_loss(model, inputs, num_items_in_batch)
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["entropy"].append(entropy_sum / jnp.maximum(num_valid_tokens, 1))
        return (loss, None) if return_outputs else loss

    def _compute_loss(
        self, unwrapped_student: Any, inputs: dict[str, jax.Array], num_items_in_batch: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The loss of a micro-batch of completions; the loss of a step is the sum over its micro-batches. A subclass
        may override it in jax.numpy; it is compiled together with its gradient.

        Args:
            unwrapped_student: only to be passed to `_get_per_token_divergences`; it cannot be called.
            inputs: TRL's, under TRL's names: `prompt_ids`, `prompt_mask` `[B, P]`, `completion_ids`, `completion_mask`
                `[B, C]` (also 0 for tool results) and `num_items_in_batch`.
            num_items_in_batch: the number of unmasked completion tokens in the step, by which the loss is divided.

        Returns:
            The loss, the sum of the student's entropies, and the number of unmasked completion tokens.
        """
        del unwrapped_student, num_items_in_batch
        current = self._current_pass("_compute_loss")
        loss = current.default_loss(inputs)
        return loss, current.default_sums["entropy"].sum(), current.default_sums["targets"].sum()

    def _get_per_token_divergences(self, model: Any, beta: float | None = None) -> TokenDivergences:
        """`divergence`, `entropy`, `student_logps` and `teacher_logps` of the completion tokens at the sampling
        temperature, float32 `[B, C]`, 0 for masked tokens; for a user-defined loss. TRL has no such method.

        Args:
            model: the model that the loss was called with.
            beta: interpolation coefficient of the divergence, from 0 to 1; None: `args.beta`.
        """
        current = self._current_pass("_get_per_token_divergences")
        return current.divergences(model, self.args.beta if beta is None else beta)

    def _other_models(self) -> dict[str, Any]:
        return {"teacher_model": self._teacher}

    def _make_reference(self, args: BaseConfig, task: Task, policy: Policy) -> ReferenceModel:
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
