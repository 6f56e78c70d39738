"""RLOO's loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.losses.policy_gradient.ratios import clipped
from trl_jax.losses.policy_gradient.reads import reads
from trl_jax.losses.policy_gradient.surrogate import Sums


def rloo_loss(
    logps: jax.Array,
    old_logps: jax.Array,
    advantages: jax.Array,
    mask: jax.Array | None = None,
    *,
    entropies: jax.Array | None = None,
    text: jax.Array | None = None,
    completion_weight: jax.Array | None = None,
    micro_batch: jax.Array | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> tuple[jax.Array, Sums]:
    r"""The clipped loss of X completions, each one action (RLOO, arXiv:2402.14740, section 3.2, with PPO's clipping).

    $$ -\sum_i w_i \min(\rho_i A_i, clip(\rho_i, 1 - \epsilon, 1 + \epsilon_{high}) A_i),
       \quad \rho_i = \exp(\sum_t l_{it} - l_{old, i}) $$

    with $w$ the completion_weight. A pass may have completions of several micro-batches, and a micro-batch may be
    divided over passes.

    Args:
        logps: `[N]` log-probabilities of the policy's tokens, or `[X, T]` without `text`. So are mask and entropies.
        old_logps: `[X]`, the log-probability of each whole completion under the policy that it was sampled with.
        advantages: `[X]`.
        mask, entropies, text, completion_weight, micro_batch: as in `grpo_loss`.

    Returns:
        The loss, a float32 scalar, and sums `[M]`: `completions` (their number), `tokens`, `entropy`, `clipped_low`,
        `clipped_high`, `clipped` over completions, and the extremes `low_min` (inf without one) and `high_max` (-inf).
    """
    places = reads(logps, mask, text, micro_batch, len(advantages))
    completion_weight = places.equal_weight if completion_weight is None else completion_weight
    advantages = advantages.astype(jnp.float32)
    ratio = jnp.exp(places.total(logps.reshape(-1)) - old_logps)
    least, most = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    losses = -jnp.minimum(ratio * advantages, clipped(ratio, least, most) * advantages)
    low = ((ratio < least) & (advantages < 0)).astype(jnp.float32)
    high = ((ratio > most) & (advantages > 0)).astype(jnp.float32)
    sums = {
        "completions": places.by_completion(jnp.ones(len(advantages))),
        "tokens": places.by_completion(places.lengths),
        "clipped_low": places.by_completion(low),
        "clipped_high": places.by_completion(high),
        "clipped": places.by_completion(low + high),
        "low_min": jnp.min(jnp.where(places.micro_batch, low, jnp.inf), axis=-1),
        "high_max": jnp.max(jnp.where(places.micro_batch, high, -jnp.inf), axis=-1),
    }
    if entropies is not None:
        sums["entropy"] = places.by_token(entropies.reshape(-1))
    return jnp.sum(completion_weight * losses), jax.lax.stop_gradient(sums)
