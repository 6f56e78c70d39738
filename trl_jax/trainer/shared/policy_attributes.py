"""Arguments that TRL's GRPOTrainer and RLOOTrainer keep on themselves, for scripts that read them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trl_jax.trainer.base_trainer import BaseTrainer

_OWN_SAMPLING = "generation_config of {}: tokens are sampled by its arguments. Say generation_kwargs in its config."


def argument(name: str, read: Callable[[Any], Any] | None = None) -> property:
    """An attribute that has the value of an argument, `read` from the arguments or that of this name. Setting another
    one raises AttributeError: nobody would look at it."""

    def get(self: BaseTrainer) -> Any:
        return vars(self.args)[name] if read is None else read(self.args)

    def put(self: BaseTrainer, value: Any) -> None:
        if "_run" not in vars(self) or value is get(self) or value == get(self):
            return  # before the constructor, as in TRL, which then overwrites it; or nothing new
        raise AttributeError(
            f"{name} was set on the trainer, which reads its arguments once: the step is compiled from them. Say "
            f"{name} in {self.config_class.__name__}."
        )

    return property(get, put, doc=f"`args.{name}`.")


class PolicyAttributes(BaseTrainer):
    """Attributes of both trainers."""

    temperature, top_p, top_k, min_p = map(argument, ("temperature", "top_p", "top_k", "min_p"))
    repetition_penalty, max_completion_length = map(argument, ("repetition_penalty", "max_completion_length"))
    num_generations, num_iterations = map(argument, ("num_generations", "num_iterations"))
    num_generations_eval = argument(
        "num_generations_eval", lambda args: args.num_generations_eval or args.num_generations
    )
    shuffle_dataset, pad_to_multiple_of = map(argument, ("shuffle_dataset", "pad_to_multiple_of"))
    use_vllm, mask_truncated_completions = map(argument, ("use_vllm", "mask_truncated_completions"))
    log_completions, num_completions_to_print = map(argument, ("log_completions", "num_completions_to_print"))
    log_unique_prompts, beta = map(argument, ("log_unique_prompts", "beta"))
    epsilon_low = argument("epsilon", lambda args: args.epsilon)
    epsilon_high = argument(
        "epsilon_high", lambda args: args.epsilon if args.epsilon_high is None else args.epsilon_high
    )
    chat_template_kwargs = argument("chat_template_kwargs", lambda args: args.chat_template_kwargs or {})

    @property
    def reward_funcs(self) -> list[Any]:
        """The reward functions, as a list. Others may be put into it at any time, and count from the next generation
        on."""
        return self._reward_funcs

    @reward_funcs.setter
    def reward_funcs(self, functions: Sequence[Any]) -> None:
        if "_reward_funcs" in vars(self):
            self._reward_funcs[:] = functions
        else:
            self._reward_funcs = list(functions)

    @property
    def generation_config(self) -> Any:
        """Raises AttributeError: tokens are sampled by the arguments."""
        raise AttributeError(_OWN_SAMPLING.format(type(self).__name__))

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        raise AttributeError(_OWN_SAMPLING.format(type(self).__name__))

    @property
    def reward_weights(self) -> np.ndarray:
        """The weight of each reward function, float32. Others may be set at any time, and count from the next
        generation on."""
        rollout = self._run.rollout.rollout
        weights = rollout.task.reward_weights
        return np.ones(len(rollout.rewards.names), np.float32) if weights is None else np.asarray(weights, np.float32)

    @reward_weights.setter
    def reward_weights(self, weights: Sequence[float]) -> None:
        if "_run" not in vars(self):
            return  # before the constructor, as in TRL, which then overwrites it
        rollout = self._run.rollout.rollout
        found = tuple(map(float, weights))
        if len(found) != len(rollout.rewards.names):
            raise ValueError(
                f"Number of reward weights ({len(found)}) must match number of reward functions "
                f"({len(rollout.rewards.names)})"
            )
        rollout.task = replace(rollout.task, reward_weights=found)
