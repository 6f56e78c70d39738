"""Cross-entropy, Bradley-Terry and load-balancing losses, and sums over batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.core.outputs import RouterSums, TokenOutputs
from trl_jax.mesh.mesh import SEQUENCE

# Pairwise loss of reward models


def pairwise_loss(
    chosen: jax.Array,
    rejected: jax.Array,
    *,
    weight: jax.Array,
    margin: jax.Array | None = None,
    center_rewards_coefficient: float | None = None,
    micro_batch: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    r"""Bradley-Terry loss of P pairs.

    $$ L = \sum_i w_i \left[ -\log \sigma(c_i - r_i - m_i) + \lambda (c_i + r_i)^2 \right] $$

    The first term is the negative log-likelihood that the chosen answer wins (Ouyang et al. 2022, eq. 1,
    arXiv:2203.02155), with a margin as in Llama 2 (arXiv:2307.09288, eq. 2); the second keeps scores centered around
    zero (Eisenstein et al. 2023, arXiv:2312.09244, eq. 2).

    Args:
        chosen: `[P]`, scores of the chosen answers.
        rejected: `[P]`, scores of the rejected answers.
        weight: `[P]`, the weight of each pair in the step's loss; 0 for padding. For TRL's mean over the pairs of each
            micro-batch and then over micro-batches, pass `1 / (micro-batches x pairs in its micro-batch)`.
        margin: `[P]`, by how much the chosen score should exceed the rejected one.
        center_rewards_coefficient: coefficient of the centering term; None omits it.
        micro_batch: bool `[M, P]`, the pairs in each micro-batch; sums are then per micro-batch, `[M]`.

    Returns:
        The loss, a float32 scalar, and sums over the pairs with a positive weight: `pairs` (their count), `correct`,
        `margin_sum`, `reward_sum` (both answers), and the extremes `reward_min`, `reward_max`. The caller divides.
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


# Losses on predicted tokens


def negative_log_likelihood(outputs: TokenOutputs, label_smoothing_factor: float = 0.0) -> jax.Array:
    r"""Cross-entropy of each target, with label smoothing: float32 `[N]`, 0 for reads without a target.

    $$ -(1 - \epsilon) \log p(y) - \frac{\epsilon}{V} \sum_v \log p(v) $$

    Label smoothing as in Szegedy et al. 2015 (arXiv:1512.00567, section 7).
    """
    if not label_smoothing_factor:
        return -outputs.logps
    return -(1 - label_smoothing_factor) * outputs.logps - label_smoothing_factor * outputs.mean_logps


def dynamic_fine_tuning(outputs: TokenOutputs) -> jax.Array:
    r"""Dynamic fine-tuning loss (DFT, arXiv:2508.05629, eq. 9): float32 `[N]`.

    $$ -\mathrm{sg}[p(y)] \log p(y) $$

    The stopped-gradient probability cancels the factor 1 / p with which the gradient of the log-likelihood emphasizes
    unlikely targets.
    """
    return -jax.lax.stop_gradient(jnp.exp(outputs.logps)) * outputs.logps


# Load-balancing loss of a mixture of experts


def load_balancing_loss(sums: RouterSums) -> jax.Array:
    """Load-balancing loss (Fedus et al. 2021, arXiv:2101.03961, eqs. 4 to 6), a float32 scalar, minimal for even load.

    E times the sum over experts of (fraction of tokens sent to the expert) x (its mean router probability), over the
    tokens of all layers together. A token sent to k experts counts k times.
    """
    tokens = jnp.maximum(jnp.sum(sums.tokens), 1)
    selected, probabilities = jnp.sum(sums.selected, axis=0), jnp.sum(sums.probabilities, axis=0)
    return selected.shape[-1] * jnp.sum(selected / tokens * (probabilities / tokens))


# Sums over examples, texts and devices


def real_examples(weight: jax.Array, micro_batch: jax.Array | None = None) -> jax.Array:
    """Which examples are real (have a positive weight): bool `[E]`; per micro-batch `[M, E]` with `micro_batch`."""
    return weight > 0 if micro_batch is None else micro_batch & (weight > 0)


def summed(values: jax.Array | float, examples: jax.Array) -> jax.Array:
    """Sum `[E]` values over the real examples, in float32: a scalar, or `[M]` for `[M, E]` examples."""
    return jnp.sum(jnp.where(examples, values, 0), axis=-1, dtype=jnp.float32)


def of_texts(values: jax.Array, text: jax.Array, texts: int) -> jax.Array:
    """Sum values over the reads of each text, float32 `[texts]`.

    Args:
        values: `[N]`, one per read.
        text: int32 `[N]`, the text of each read; `texts` for padding.
    """
    return jnp.zeros(texts, jnp.float32).at[text].add(values.astype(jnp.float32), mode="drop")


def at_reads(values: jax.Array, text: jax.Array) -> jax.Array:
    """Give each read its text's value, `[N]`; 0 for padding.

    Args:
        values: `[X]`, one per text.
        text: int32 `[N]`, the text of each read; X for padding.
    """
    return jnp.asarray(values).at[text].get(mode="fill", fill_value=0)


def mean_over_shards(value: jax.Array) -> jax.Array:
    """Mean of a value over the devices that share the batch; the value itself on a single device. All devices have
    equal weight, like ranks in accelerate's `gather(...).mean()`."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return jax.lax.pmean(value, axes) if axes else value


def of_all_shards(values: jax.Array) -> jax.Array:
    """Concatenate the `[N]` values of all devices that share the batch; unchanged on a single device. Devices along
    the sequence axis hold the same values, so that axis is not gathered."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    shared = tuple(axis for axis in axes if axis != SEQUENCE)
    return jax.lax.all_gather(values, shared, tiled=True) if shared else values
