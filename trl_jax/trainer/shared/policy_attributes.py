"""Arguments that TRL's GRPOTrainer and RLOOTrainer keep on themselves, for scripts that read them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trl_jax.trainer.shared.rollout_attributes import argument
from trl_jax.trainer.shared.with_rollout import TrainerWithRollout


class PolicyAttributes(TrainerWithRollout):
    """Attributes of both trainers."""

    num_generations, num_iterations = map(argument, ("num_generations", "num_iterations"))
    num_generations_eval = argument(
        "num_generations_eval", lambda args: args.num_generations_eval or args.num_generations
    )
    mask_truncated_completions = argument("mask_truncated_completions")
    epsilon_low = argument("epsilon", lambda args: args.epsilon)
    epsilon_high = argument(
        "epsilon_high", lambda args: args.epsilon if args.epsilon_high is None else args.epsilon_high
    )

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
    def reward_weights(self) -> np.ndarray:
        """The weight of each reward function, float32. Others may be set at any time, and count from the next
        generation on."""
        judge = self._run.rollout.rollout.judge
        weights = judge.task.reward_weights
        return np.ones(len(judge.rewards.names), np.float32) if weights is None else np.asarray(weights, np.float32)

    @reward_weights.setter
    def reward_weights(self, weights: Sequence[float]) -> None:
        if "_run" not in vars(self):
            return  # before the constructor, as in TRL, which then overwrites it
        judge = self._run.rollout.rollout.judge
        found = tuple(map(float, weights))
        if len(found) != len(judge.rewards.names):
            raise ValueError(
                f"Number of reward weights ({len(found)}) must match number of reward functions "
                f"({len(judge.rewards.names)})"
            )
        judge.task = replace(judge.task, reward_weights=found)
