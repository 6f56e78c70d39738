"""The surrogate losses of tokens, whose gradient is the policy's."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trl_jax.losses.policy_gradient.ratios import clipped, gamma_weights
from trl_jax.losses.policy_gradient.reads import Reads
from trl_jax.losses.policy_gradient.settings import CLIPPED, PolicyLoss

Sums = dict[str, jax.Array]


class Policies(NamedTuple):
    """Log-probabilities of the policy and of the one that sampled, `[N]`; advantages `[X]`; and where tokens belong."""

    logps: jax.Array
    old_logps: jax.Array
    advantages: jax.Array
    places: Reads

    def ratio(self, settings: PolicyLoss) -> jax.Array:
        """The ratio of both policies: of tokens `[N]`, or of completions `[X]`, the geometric mean of their tokens'."""
        difference = self.logps - self.old_logps
        return jnp.exp(self.places.mean(difference) if settings.of_sequences else difference)

    def of_tokens(self, settings: PolicyLoss, values: jax.Array) -> jax.Array:
        """Values of ratios, at the tokens: `[N]`."""
        return self.places.spread(values) if settings.of_sequences else values

    def sums(self, settings: PolicyLoss, values: jax.Array) -> jax.Array:
        """Sums of values of ratios over micro-batches, `[M]`."""
        return (self.places.by_completion if settings.of_sequences else self.places.by_token)(values)


def surrogate(settings: PolicyLoss, policies: Policies, correction: jax.Array | None) -> tuple[jax.Array, Sums]:
    """The losses of tokens, `[N]`, by `settings.loss_type`, and sums of what was clipped or weighed, `[M]`.

    Args:
        correction: of `sampler_ratio`; of these losses only vespo's takes it.
    """
    logps, advantages = policies.logps, policies.places.spread(policies.advantages)
    ratio = policies.of_tokens(settings, policies.ratio(settings))
    if settings.loss_type in CLIPPED:
        within = clipped(ratio, 1 - settings.epsilon, 1 + settings.highest)
        losses = -jnp.minimum(clipped(ratio, most=settings.delta) * advantages, within * advantages)
        return losses, _clipped_sums(settings, policies)
    if settings.loss_type == "cispo":
        capped = jax.lax.stop_gradient(jnp.minimum(ratio, settings.highest))
        return -capped * advantages * logps, _capped_sums(settings, policies)
    if settings.loss_type == "sapo":
        tau = jnp.where(advantages > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg)
        return -jax.nn.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages, {}
    phi = gamma_weights(logps - policies.old_logps, policies.advantages, correction, settings, policies.places)
    return -policies.places.spread(phi) * advantages * logps, {"phi": policies.places.by_completion(phi)}


def _capped_sums(settings: PolicyLoss, policies: Policies) -> Sums:
    high, _ = _compared(settings, policies, settings.highest, -jnp.inf)
    return {"cispo_clipped": policies.sums(settings, high)}


def _clipped_sums(settings: PolicyLoss, policies: Policies) -> Sums:
    places = policies.places
    high, low = _compared(settings, policies, 1 + settings.highest, 1 - settings.epsilon)
    compared = places.micro_batch if settings.of_sequences else places.micro_batch & (places.lengths > 0)
    lows, highs = (low, high) if settings.of_sequences else (places.mean(low), places.mean(high))
    return {
        "clipped_low": policies.sums(settings, low),
        "clipped_high": policies.sums(settings, high),
        "clipped": policies.sums(settings, low + high),
        "low_min": jnp.min(jnp.where(compared, lows, jnp.inf), axis=-1),
        "high_max": jnp.max(jnp.where(compared, highs, -jnp.inf), axis=-1),
    }


def _compared(settings: PolicyLoss, policies: Policies, most: float, least: float) -> tuple[jax.Array, jax.Array]:
    """1 where the ratio, after delta, is above `most` of a positive advantage, and below `least` of a negative one."""
    ratio, advantages = policies.ratio(settings), policies.advantages
    if settings.loss_type in CLIPPED:
        ratio = clipped(ratio, most=settings.delta)
    if not settings.of_sequences:
        advantages = policies.places.spread(advantages)
    high, low = (ratio > most) & (advantages > 0), (ratio < least) & (advantages < 0)
    return high.astype(jnp.float32), low.astype(jnp.float32)
