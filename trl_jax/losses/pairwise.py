"""The reward-modelling loss on pairs of scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.losses.sums import real_examples, summed


def pairwise_loss(
    chosen: jax.Array,
    rejected: jax.Array,
    *,
    weight: jax.Array,
    margin: jax.Array | None = None,
    center_rewards_coefficient: float | None = None,
    micro_batch: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    r"""Bradley-Terry loss of `P` pairs.

    $$ L = \sum_i w_i \left[ -\log \sigma(c_i - r_i - m_i) + \lambda (c_i + r_i)^2 \right] $$

    The first term is the negative log-likelihood that the chosen answer wins (Ouyang et al. 2022, eq. 1,
    arXiv:2203.02155) with a margin as in Llama 2 (arXiv:2307.09288, eq. 2); the second keeps scores centred
    (Eisenstein et al. 2023, arXiv:2312.09244, eq. 2).

    Args:
        chosen: `[P]` scores of the preferred answers.
        rejected: `[P]` scores of the others.
        weight: `[P]` share of each pair in the step's loss; 0 marks a pair that only fills the shape. TRL's mean over
            the pairs of each micro-batch, then over the micro-batches, is `1 / (micro-batches x pairs in its own)`.
        margin: `[P]` by how much a chosen score should lead.
        center_rewards_coefficient: the factor of the centring term; None leaves it out.
        micro_batch: bool `[M, P]`, the pairs of each micro-batch; the sums are then `[M]`, one for each of them.

    Returns:
        The loss, a float32 scalar, and sums over the pairs with a weight: `pairs` (their number), `correct`,
        `margin_sum`, `reward_sum` (both answers), and the extremes `reward_min`, `reward_max`. Means are left to
        whoever knows what to divide by.
    """
    chosen, rejected = chosen.astype(jnp.float32), rejected.astype(jnp.float32)
    score_difference = chosen - rejected
    losses = -jax.nn.log_sigmoid(score_difference if margin is None else score_difference - margin)
    if center_rewards_coefficient is not None:
        losses += center_rewards_coefficient * jnp.square(chosen + rejected)
    return jnp.sum(weight * losses), _sums(chosen, rejected, real_examples(weight, micro_batch))


def _sums(chosen: jax.Array, rejected: jax.Array, pairs: jax.Array) -> dict[str, jax.Array]:
    return {
        "pairs": summed(1.0, pairs),
        "correct": summed(chosen > rejected, pairs),
        "margin_sum": summed(chosen - rejected, pairs),
        "reward_sum": summed(chosen + rejected, pairs),
        "reward_min": jnp.min(jnp.where(pairs, jnp.minimum(chosen, rejected), jnp.inf), axis=-1),
        "reward_max": jnp.max(jnp.where(pairs, jnp.maximum(chosen, rejected), -jnp.inf), axis=-1),
    }
