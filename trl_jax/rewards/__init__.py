"""The reward functions of TRL's `trl.rewards`: pure Python, no model."""

from trl_jax.rewards.accuracy_rewards import accuracy_reward, get_cosine_scaled_reward, reasoning_accuracy_reward
from trl_jax.rewards.format_rewards import think_format_reward
from trl_jax.rewards.other_rewards import get_repetition_penalty_reward, get_soft_overlong_punishment

__all__ = [
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "think_format_reward",
]
