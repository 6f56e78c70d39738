"""Losses of the tokens that a language model predicts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.core.token_outputs import TokenOutputs


def negative_log_likelihood(outputs: TokenOutputs, label_smoothing_factor: float = 0.0) -> jax.Array:
    r"""The cross-entropy of each read with its target, smoothed: float32 `[N]`, zeros where there is no target.

    $$ -(1 - \epsilon) \log p(y) - \frac{\epsilon}{V} \sum_v \log p(v) $$

    Label smoothing is that of Szegedy et al. 2015 (arXiv:1512.00567, section 7).
    """
    if not label_smoothing_factor:
        return -outputs.logps
    return -(1 - label_smoothing_factor) * outputs.logps - label_smoothing_factor * outputs.mean_logps


def dynamic_fine_tuning(outputs: TokenOutputs) -> jax.Array:
    r"""The loss of dynamic fine-tuning (arXiv:2508.05629, equation 9): float32 `[N]`.

    $$ -\mathrm{sg}[p(y)] \log p(y) $$

    The probability, through which no gradient goes, takes away the weight 1 / p that the gradient of a log-likelihood
    gives to unlikely targets.
    """
    return -jax.lax.stop_gradient(jnp.exp(outputs.logps)) * outputs.logps
