"""Losses in plain `jax.numpy`: arrays in, the loss and sums for metrics out. They never see a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trl_jax.core.trainers import lazy_getattr, places

if TYPE_CHECKING:  # what type checkers and editors see
    from trl_jax.losses.advantages import group_advantages, rloo_advantages
    from trl_jax.losses.dpo import PairLogps, PreferenceLoss
    from trl_jax.losses.kto import UnpairedLoss, kl_estimate
    from trl_jax.losses.policy_gradient import PolicyLoss, clipped, grpo_loss, kl_k3, rloo_loss
    from trl_jax.losses.reference_free import ContrastiveLoss, odds_ratio
    from trl_jax.losses.supervised import dynamic_fine_tuning, negative_log_likelihood, pairwise_loss

_WHERE = places(
    "trl_jax.losses",
    {
        "advantages": "group_advantages rloo_advantages",
        "dpo": "PairLogps PreferenceLoss",
        "kto": "UnpairedLoss kl_estimate",
        "policy_gradient": "PolicyLoss clipped grpo_loss kl_k3 rloo_loss",
        "reference_free": "ContrastiveLoss odds_ratio",
        "supervised": "dynamic_fine_tuning negative_log_likelihood pairwise_loss",
    },
)
__all__ = sorted(_WHERE)
__getattr__ = lazy_getattr(__name__, _WHERE)
