"""Policy gradients of sampled completions: GRPO and its kin, and RLOO. Pure functions of arrays, usable alone.

    rewards -> `group_advantages` or `rloo_advantages` -> `grpo_loss` or `rloo_loss` -> (loss, sums for the metrics)

Arrays of tokens are flat, `[N]`, with `text` `[N]` to say which of X completions a token belongs to: they may lie in
memory in any way. Functions that say so take `[X, T]` as well, a row a completion.
"""

from trl_jax.losses.policy_gradient.advantages import Advantages, group_advantages, rloo_advantages
from trl_jax.losses.policy_gradient.entropy import entropy_mask, next_entropy_coef
from trl_jax.losses.policy_gradient.grpo import grpo_loss
from trl_jax.losses.policy_gradient.ratios import kl_k3, sampler_ratio
from trl_jax.losses.policy_gradient.rloo import rloo_loss
from trl_jax.losses.policy_gradient.settings import LOSSES, PolicyLoss
from trl_jax.losses.policy_gradient.weights import token_weights

__all__ = [
    "LOSSES",
    "Advantages",
    "PolicyLoss",
    "entropy_mask",
    "group_advantages",
    "grpo_loss",
    "kl_k3",
    "next_entropy_coef",
    "rloo_advantages",
    "rloo_loss",
    "sampler_ratio",
    "token_weights",
]
