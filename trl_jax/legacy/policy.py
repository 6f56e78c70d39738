"""The constructor and the reward models of RLOOTrainer up to TRL 0.21."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import TrainingArguments

from trl_jax.config.renamed import OLD_RLOO_ARGUMENTS, RENAMED_IN_RLOO
from trl_jax.data.prompts import prompt_ids
from trl_jax.hub.torch_objects import is_torch_model
from trl_jax.legacy.arguments import tell
from trl_jax.rollout.rewards import RewardModel, is_model, reward_model
from trl_jax.trainer.collators import AcceptedCollators

_DEFAULTS = (
    "Arguments that the config does not set have the current defaults: num_iterations=1 (was 4), "
    "max_completion_length=512 (was 53), temperature=1.0 (was 0.7). The EOS token ends a completion, as with "
    "stop_token='eos', and an epoch completes each prompt num_generations times (was once)."
)


def modern_policy(trainer: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Translate the old arguments, with one FutureWarning for all. A reference model is stored on the trainer.

    Raises:
        TypeError: an argument is given by its old and its new name, or the config is passed as the first argument.
        ValueError: policy and ref_policy are the same object, or there is a custom data collator.
    """
    if args and isinstance(args[0], TrainingArguments):
        raise TypeError(
            f"The first argument is a {type(args[0]).__name__}, as RLOOTrainer took it up to TRL 0.21. Pass it as "
            "args=, and the others by name: model=, reward_funcs=, train_dataset=, processing_class=."
        )
    old = [name for name in kwargs if name in OLD_RLOO_ARGUMENTS]
    if not old:
        return kwargs
    renamed = _rename(kwargs)
    collator, reference = renamed.pop("data_collator", None), renamed.pop("ref_policy", None)
    if collator is not None and type(collator).__name__ != "DataCollatorWithPadding":
        AcceptedCollators().check(collator)
    by_name = isinstance(reference, str | os.PathLike)  # a checkpoint, which is loaded separately
    if reference is not None and not by_name and reference is renamed.get("model"):
        raise ValueError(
            "`policy` and `ref_policy` cannot be the same object. Remove ref_policy: the reference is then the model "
            "before training."
        )
    if reference is not None:
        trainer._ref_model = reference
    if "reward_model" in kwargs:
        tokenizer = renamed.get("processing_class", renamed.get("tokenizer"))
        renamed["reward_funcs"] = _reward_source(trainer, kwargs["reward_model"], tokenizer)
    tell(
        f"RLOOTrainer({', '.join(f'{name}=' for name in old)}) is the constructor of TRL up to 0.21. Use args=, model= "
        f"and reward_funcs=; the reference is the model before training. {_DEFAULTS}",
        above=2,
    )
    return renamed


def _rename(kwargs: dict[str, Any]) -> dict[str, Any]:
    for old, new in RENAMED_IN_RLOO.items():
        if old in kwargs and new in kwargs:
            raise TypeError(f"{old} and {new} are the same argument. Remove {old}.")
    return {RENAMED_IN_RLOO.get(name, name): value for name, value in kwargs.items()}


def _reward_source(trainer: Any, reward: Any, tokenizer: Any) -> Any:
    """Wrap `reward_model` to score as in TRL 0.21: a model reads the policy's tokens, a function gets whole texts.

    A function with the current signature is returned unchanged.
    """
    if not is_model(reward):
        if not callable(reward) or takes_completions(reward):
            return reward
        return TextScores(reward, functools.partial(_ids, trainer), functools.partial(_decode, trainer))
    no_pad_row = not is_torch_model(reward) or _vocab_size(reward) <= (getattr(tokenizer, "pad_token_id", None) or 0)
    model = reward_model(reward, None if no_pad_row else tokenizer)
    return TokenScores(model, functools.partial(_ids, trainer))


def _vocab_size(model: Any) -> int:
    return model.get_input_embeddings().num_embeddings


def _ids(trainer: Any, prompts: list) -> list[list[int]]:
    args = trainer.args
    options = {"template_options": args.chat_template_kwargs, "max_prompt_length": args.max_prompt_length}
    return prompt_ids(prompts, trainer.processing_class, **options)


def _decode(trainer: Any, ids: list[list[int]]) -> list[str]:
    return trainer.processing_class.batch_decode(ids, skip_special_tokens=True)


# Rewards of RLOOTrainer up to TRL 0.21


@dataclass
class TokenScores:
    """A reward model that reads the policy's tokens: the prompt and the completion, including EOS.

    prompt_ids: prompts -> token ids.
    """

    model: RewardModel
    prompt_ids: Callable[[list], list[list[int]]]

    @property
    def __name__(self) -> str:
        return self.model.name

    def __call__(self, prompts: list, completion_ids: Sequence[list[int]], **columns: Any) -> list[float]:
        return self.model.scores(_concatenate(self.prompt_ids(prompts), completion_ids)).tolist()


@dataclass
class TextScores:
    """A reward function of whole texts: prompt and completion, without special tokens.

    decode: token ids -> texts.
    """

    function: Callable[[list[str]], Any]
    prompt_ids: Callable[[list], list[list[int]]]
    decode: Callable[[list[list[int]]], list[str]]

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, prompts: list, completion_ids: Sequence[list[int]], **columns: Any) -> Any:
        return self.function(self.decode(_concatenate(self.prompt_ids(prompts), completion_ids)))


@dataclass
class MissingEos:
    """A reward of -penalty for completions without an EOS token.

    eos: returns the id of the EOS token.
    """

    penalty: float
    eos: Callable[[], int | None]
    __name__ = "missing_eos_penalty"

    def __call__(self, completion_ids: Sequence[list[int]], **columns: Any) -> list[float]:
        eos = self.eos()
        return np.where([eos in ids for ids in completion_ids], 0.0, -self.penalty).tolist()


def takes_completions(function: Callable[..., Any]) -> bool:
    """Whether a function has the current signature, with keyword arguments."""
    parameters = inspect.signature(function).parameters
    return "completions" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _concatenate(prompt_ids: list[list[int]], completion_ids: Sequence[list[int]]) -> list[list[int]]:
    return [[*prompt, *completion] for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
