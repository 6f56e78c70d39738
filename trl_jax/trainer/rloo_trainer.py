"""REINFORCE leave-one-out: TRL's RLOOTrainer on JAX."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import TrainingArguments
from transformers.trainer_callback import TrainerCallback

from trl_jax.config.renamed import OLD_RLOO_ARGUMENTS
from trl_jax.data.chat import ProcessorTokenizer
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.tasks.policy import RlooTask
from trl_jax.trainer.arguments import InitOnlyArg, accepting_old_keywords, as_config
from trl_jax.trainer.online import OnlineTrainer, clip_range
from trl_jax.trainer.rloo_config import RLOOConfig


def _modern_arguments(trainer: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Translate arguments of the constructor up to TRL 0.21 to current keyword arguments."""
    if kwargs.keys() & OLD_RLOO_ARGUMENTS.keys() or (args and isinstance(args[0], TrainingArguments)):
        from trl_jax.legacy.policy import modern_policy

        return modern_policy(trainer, args, kwargs)
    return kwargs


class RLOOTrainer(OnlineTrainer):
    """Trains a language model on its own completions; the advantage is the reward minus the mean reward of the prompt's
    other completions (https://huggingface.co/papers/2402.14740).

    The arguments are TRL's, in TRL's order, and described in `GRPOTrainer`. `rollout_func` does not exist in TRL's
    RLOOTrainer; the log-probabilities that it returns are not used.
    """

    _name, _tag_names = "RLOO", ["trl", "rloo"]
    _paper = (
        "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback in LLMs",
        "2402.14740",
    )
    config_class = RLOOConfig
    _traits = replace(
        OnlineTrainer._traits,
        old_arguments=OLD_RLOO_ARGUMENTS,
        reader=ProcessorTokenizer,  # TRL's RLOOTrainer makes parts only of prompts with images
        writes_completions=False,
        averages_losses=True,
        parses_messages=False,
    )
    epsilon_low, epsilon_high = clip_range()
    normalize_advantages, reward_clip_range = InitOnlyArg(), InitOnlyArg()

    @accepting_old_keywords(first=_modern_arguments)
    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel,
        reward_funcs: Any,
        args: RLOOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        rollout_func: Callable | None = None,
    ):
        self.rollout_func = rollout_func
        args = None if args is None else as_config(args, RLOOConfig)
        if args is not None and args.missing_eos_penalty is not None:
            reward_funcs, reward_processing_classes = self._with_penalty(
                reward_funcs, reward_processing_classes, args.missing_eos_penalty
            )
        super().__init__(
            model, reward_funcs, reward_processing_classes, args=args, train_dataset=train_dataset,
            eval_dataset=eval_dataset, processing_class=processing_class, callbacks=callbacks, optimizers=optimizers,
            quantization_config=quantization_config, peft_config=peft_config,
        )  # fmt: skip

    def _with_penalty(self, functions: Any, tokenizers: Any, penalty: float) -> tuple[list, list | None]:
        """The reward functions plus a penalty for completions without an EOS token, and their tokenizers."""
        from trl_jax.legacy.policy import MissingEos

        judge = MissingEos(penalty, lambda: self.processing_class.eos_token_id)
        functions, tokenizers = (
            list(value) if isinstance(value, list | tuple) else [value] for value in (functions, tokenizers)
        )
        return [*functions, judge], None if tokenizers == [None] else [*tokenizers, None]

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: None, multimodal_fields: dict[str, Any]
    ) -> list[list[int]]:
        """One completion per prompt; a `rollout_func` may call it. `images` must be None; `multimodal_fields` is
        ignored."""
        del multimodal_fields
        return self._complete_once(prompt_ids, images, self.args.num_generations)[0]

    @property
    def policy(self) -> Any:
        """The model, under its name in TRL up to 0.21."""
        return self.model

    def generate_completions(self, sampling: bool = False) -> None:
        """Deprecated (TRL up to 0.21): calls `evaluate()`, if there is an evaluation set.

        Args:
            sampling: has no effect; all rows are completed.
        """
        from trl_jax.legacy.arguments import tell

        tell(
            "generate_completions() is of TRL up to 0.21: it evaluates. Call evaluate(), and set log_completions=True "
            "for a table of the completions."
        )
        if self.eval_dataset is not None:
            self.evaluate()

    def make_task(self) -> RlooTask:
        args = self.args
        return RlooTask(
            **self._policy_options(),
            epsilon=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            reward_clip_range=args.reward_clip_range,
            normalize_advantages=args.normalize_advantages,
        )
