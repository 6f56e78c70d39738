"""Rows of reward models: pairs of a chosen and a rejected answer, whole, with the prompt in front of each."""

from trl_jax.data.rows.preference.reward.preparation import prepare

__all__ = ["prepare"]
