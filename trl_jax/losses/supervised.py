"""Cross entropy, pairwise and load balancing losses, and sums over batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.core.outputs import RouterSums, TokenOutputs
from trl_jax.mesh.mesh import SEQUENCE

# ----------------------------------------------------------------------------------------------------
# The reward-modelling loss on pairs of scores.


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


# ----------------------------------------------------------------------------------------------------
# Losses of the tokens that a language model predicts.


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


# ----------------------------------------------------------------------------------------------------
# The load-balancing loss of a mixture of experts (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6).


def load_balancing_loss(sums: RouterSums) -> jax.Array:
    """E times the sum over experts of the share of tokens sent to each and its mean probability, over the tokens of all
    layers together; several experts a token count each. A float32 scalar, least where the load is even."""
    tokens = jnp.maximum(jnp.sum(sums.tokens), 1)
    selected, probabilities = jnp.sum(sums.selected, axis=0), jnp.sum(sums.probabilities, axis=0)
    return selected.shape[-1] * jnp.sum(selected / tokens * (probabilities / tokens))


# ----------------------------------------------------------------------------------------------------
# Sums over the examples of a batch, or of each of its micro-batches.


def real_examples(weight: jax.Array, micro_batch: jax.Array | None = None) -> jax.Array:
    """Which examples count: bool `[E]`, those with a weight; with `micro_batch` bool `[M, E]`, those of each."""
    return weight > 0 if micro_batch is None else micro_batch & (weight > 0)


def summed(values: jax.Array | float, examples: jax.Array) -> jax.Array:
    """The sum of `[E]` values over the examples that are real, float32: a scalar, or `[M]`."""
    return jnp.sum(jnp.where(examples, values, 0), axis=-1, dtype=jnp.float32)


def of_texts(values: jax.Array, text: jax.Array, texts: int) -> jax.Array:
    """The sum over the reads of each text, float32 `[texts]`.

    Args:
        values: `[N]`, of each read.
        text: int32 `[N]`, the text of each; `texts` where it belongs to none.
    """
    return jnp.zeros(texts, jnp.float32).at[text].add(values.astype(jnp.float32), mode="drop")


def at_reads(values: jax.Array, text: jax.Array) -> jax.Array:
    """For each read `[N]` the value of its text; 0 of one that belongs to none.

    Args:
        values: `[X]`, of each text; of each example, where an example is one text.
        text: int32 `[N]`, the text of each read; X where it belongs to none.
    """
    return jnp.asarray(values).at[text].get(mode="fill", fill_value=0)


def mean_over_shards(value: jax.Array) -> jax.Array:
    """The mean of a value over the devices that each have a share of the batch, on all of them; without several
    devices the value itself. Shares weigh the same, as ranks do in accelerate's `gather(...).mean()`."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return jax.lax.pmean(value, axes) if axes else value


def of_all_shards(values: jax.Array) -> jax.Array:
    """The `[N]` values of each device that has a share of the batch, end to end; without several devices as they are.
    Along the sequence axis devices have the same ones, which count once."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    shared = tuple(axis for axis in axes if axis != SEQUENCE)
    return jax.lax.all_gather(values, shared, tiled=True) if shared else values
