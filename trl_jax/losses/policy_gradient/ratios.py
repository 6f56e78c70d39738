"""Ratios of policies, and the weights and divergences that are made of them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from trl_jax.losses.policy_gradient.reads import Reads, reads
from trl_jax.losses.policy_gradient.settings import PolicyLoss

_LEAST, _MOST = math.log(1e-8), 20.0  # of the logarithms of VESPO's weights


def kl_k3(logps: jax.Array, ref_logps: jax.Array) -> jax.Array:
    r"""An estimate of a policy's divergence from a reference, of each token, never below 0; of any shape.

    $$ \frac{\pi_{ref}}{\pi} - \log \frac{\pi_{ref}}{\pi} - 1 $$

    The estimator k3 of Schulman 2020, "Approximating KL Divergence"; GRPO, arXiv:2402.03300, eq. 4.
    """
    ratio = ref_logps - logps
    return jnp.exp(ratio) - ratio - 1


def clipped(values: jax.Array, least: float | None = None, most: float | None = None) -> jax.Array:
    """Values within bounds. The gradient goes through at a bound itself, as in torch; jnp.clip would halve it."""
    values = values if most is None else jnp.where(values > most, most, values)
    return values if least is None else jnp.where(values < least, least, values)


def sampler_ratio(
    old_logps: jax.Array,
    sampling_logps: jax.Array,
    mask: jax.Array | None = None,
    text: jax.Array | None = None,
    completions: int | None = None,
    *,
    settings: PolicyLoss,
) -> jax.Array:
    """The ratio of the old policy and what sampled the tokens, truncated or masked as `settings` says.

    Truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training") and masked (Liu et al. 2025, "When Speed Kills Stability"). A token whose log-probability the sampler did
    not give, NaN, differs by nothing.

    Args:
        old_logps, sampling_logps, mask: `[N]` with `text` `[N]` and the number of completions X; or `[X, T]`.

    Returns:
        Of token_* corrections `[N]` (X T of `[X, T]`), 1 where the mask is 0; of sequence_* `[X]`.
    """
    completions = len(old_logps) if completions is None else completions
    places = reads(old_logps, mask, text, None, completions)
    difference = places.difference(old_logps, sampling_logps)
    if settings.corrects_sequences:
        difference = places.total(difference)
    ratio, least, most = jnp.exp(difference), settings.sampler_clip_min, settings.sampler_clip_max
    if settings.sampler_correction.endswith("truncate"):
        return clipped(ratio, least, most)
    outside = (ratio < (-math.inf if least is None else least)) | (ratio > (math.inf if most is None else most))
    return jnp.where(outside, 0, ratio)


def off_policy_mask(
    logps: jax.Array, sampling_logps: jax.Array, advantages: jax.Array, threshold: float, places: Reads
) -> jax.Array:
    """Which completions count, bool `[X]`: those of an advantage from 0 on, and those whose mean log-ratio of sampler
    and policy is at most `threshold` (DeepSeek-V3.2, arXiv:2512.02556, eq. 9)."""
    divergence = places.mean(places.difference(sampling_logps, jax.lax.stop_gradient(logps)))
    return (advantages >= 0) | (divergence <= threshold)


def gamma_weights(
    log_ratio: jax.Array, advantages: jax.Array, correction: jax.Array | None, settings: PolicyLoss, places: Reads
) -> jax.Array:
    r"""VESPO's weight of each completion, `[X]`, without gradient: $e^\lambda w^k e^{-\lambda w}$, 1 at $w = 1$
    (arXiv:2602.10693).

    Args:
        log_ratio: `[N]`; w is the product of the tokens' ratios.
        correction: of `sampler_ratio`, a further factor of w.
    """
    log_w = places.total(jnp.clip(log_ratio, -_MOST, _MOST))
    if correction is not None:
        logs = jnp.clip(jnp.log(correction), _LEAST, _MOST)
        log_w += logs if settings.corrects_sequences else places.total(logs)
    log_w = jnp.clip(log_w, _LEAST, _MOST)
    k = jnp.where(advantages >= 0, settings.vespo_k_pos, settings.vespo_k_neg)
    decay = jnp.where(advantages >= 0, settings.vespo_lambda_pos, settings.vespo_lambda_neg)
    decay = jnp.maximum(decay, 1e-4)
    phi = jnp.exp(decay + k * log_w - decay * jnp.exp(log_w))
    return jax.lax.stop_gradient(jnp.nan_to_num(phi, nan=0.0, posinf=0.0, neginf=0.0))
