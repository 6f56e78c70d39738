"""GRPO's loss and those that grew out of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.losses.policy_gradient.entropy import entropy_mask
from trl_jax.losses.policy_gradient.ratios import kl_k3, off_policy_mask, sampler_ratio
from trl_jax.losses.policy_gradient.reads import Reads, reads
from trl_jax.losses.policy_gradient.settings import DEFAULTS, PolicyLoss
from trl_jax.losses.policy_gradient.surrogate import Policies, Sums, surrogate
from trl_jax.losses.policy_gradient.weights import token_weights


def grpo_loss(
    logps: jax.Array,
    advantages: jax.Array,
    mask: jax.Array | None = None,
    *,
    old_logps: jax.Array | None = None,
    ref_logps: jax.Array | None = None,
    entropies: jax.Array | None = None,
    sampling_logps: jax.Array | None = None,
    text: jax.Array | None = None,
    token_weight: jax.Array | None = None,
    completion_weight: jax.Array | None = None,
    micro_batch: jax.Array | None = None,
    entropy_coef: jax.Array | float | None = None,
    settings: PolicyLoss = DEFAULTS,
) -> tuple[jax.Array, Sums]:
    r"""The loss of X completions, as `settings` says, and sums for TRL's metrics.

    $$ \sum_t w_t (x_t + \beta\, \mathrm{KL}_t) - c \bar H $$

    with $w$ of `token_weights`, $x$ of `PolicyLoss` times the masks and the sampler's correction, $c$ the entropy
    coefficient and $\bar H$ the mean over micro-batches of the mean entropy of their tokens, those of `entropy_mask`.

    A pass may have completions of several micro-batches, and a micro-batch may be divided over passes; but for
    top_entropy_quantile below 1 and an entropy bonus, which need a micro-batch as a whole.

    Args:
        logps: `[N]` log-probabilities of the policy's tokens, at the temperature they were sampled with; or `[X, T]`
            without `text`. The next five are in the same shape.
        advantages: `[X]`.
        mask: which tokens count; None: all that belong to a completion.
        old_logps: of the policy that the completions were sampled with. None: it is this policy.
        ref_logps: of the reference; needed where beta is not 0.
        entropies: of the policy at each token, with their gradient; needed below top_entropy_quantile 1.0 and for a
            bonus. None: no metric of them.
        sampling_logps: those that the sampler gave, NaN where it did not; needed by sampler_correction. The off-policy
            mask takes old_logps without.
        text: int32 `[N]`, the completion of each token, X of one that only fills the shape.
        token_weight: `[X]`, of `token_weights`. None: computed of these completions as all of the step and generation.
        completion_weight: `[X]`, as in `token_weights`, 0 of a completion that only fills the shape. None: all
            micro-batches, and the completions of each, weigh the same.
        micro_batch: bool `[M, X]`; None: one of all completions.
        entropy_coef: the coefficient of the entropy bonus, 0 while an adaptive one rests; None: no bonus.

    Returns:
        The loss, a float32 scalar, and sums `[M]`: `completions` (their number), `completion_weight`, `tokens`,
        `policy_loss`, and as the settings have it `kl`, `entropy`, `bonus_entropy` and `bonus_tokens`, `clipped_low`,
        `clipped_high`, `clipped`, the extremes over completions `low_min` (inf without one) and `high_max` (-inf),
        `cispo_clipped`, `phi`. Sums of clipped ratios and of phi are over tokens, or completions where ratios are so.
    """
    places = reads(logps, mask, text, micro_batch, len(advantages))
    given = (old_logps, ref_logps, entropies, sampling_logps)
    logps, old, ref, entropies, sampling = (_masked(values, places) for values in (logps, *given))
    old = jax.lax.stop_gradient(logps) if old is None else old
    if completion_weight is None:
        completion_weight = places.equal_weight
    if token_weight is None:
        token_weight = token_weights(settings, places.lengths, completion_weight, places.micro_batch)
    policies = Policies(logps, old, advantages.astype(jnp.float32), places)
    uncertain = _uncertain(settings, entropies, places)
    losses, sums = _token_losses(settings, policies, ref, sampling, uncertain)
    losses = token_weight * places.total(losses)
    sums |= {
        "completions": places.by_completion(jnp.ones(len(advantages))),
        "tokens": places.by_completion(places.lengths),
        "completion_weight": places.by_completion(completion_weight),
        "policy_loss": places.by_completion(losses),
    }
    if entropies is not None:
        sums["entropy"] = places.by_token(entropies)
    loss = jnp.sum(losses)
    if entropy_coef is not None:
        sums |= {"bonus_entropy": places.by_token(entropies * uncertain), "bonus_tokens": places.by_token(uncertain)}
        mean = sums["bonus_entropy"] / jnp.maximum(sums["bonus_tokens"], 1)
        loss -= entropy_coef * jnp.sum(sums["completion_weight"] * mean)
    return loss, jax.lax.stop_gradient(sums)


def _token_losses(
    settings: PolicyLoss, policies: Policies, ref: jax.Array | None, sampling: jax.Array | None, uncertain: jax.Array
) -> tuple[jax.Array, Sums]:
    """The loss of each token, `[N]`: the surrogate as the masks and the sampler's correction leave it, and the KL."""
    places, old, correction = policies.places, policies.old_logps, None
    if settings.sampler_correction is not None:
        completions = len(policies.advantages)
        correction = sampler_ratio(old, sampling, places.mask, places.text, completions, settings=settings)
    losses, sums = surrogate(settings, policies, correction)
    losses *= _token_factors(settings, policies, old if sampling is None else sampling, correction) * uncertain
    if settings.beta:
        kl = kl_k3(policies.logps, ref)
        if settings.use_bias_correction_kl:
            kl *= policies.of_tokens(settings, policies.ratio(settings))
        losses += settings.beta * kl
        sums["kl"] = places.by_token(kl)
    return losses, sums


def _masked(values: jax.Array | None, places: Reads) -> jax.Array | None:
    """Float32 `[N]`, 0 where a token does not count: whatever stands there, it is in no value and no gradient."""
    return None if values is None else jnp.where(places.mask, values.reshape(-1).astype(jnp.float32), 0)


def _uncertain(settings: PolicyLoss, entropies: jax.Array | None, places: Reads) -> jax.Array:
    """1 of the tokens whose loss counts by their entropy, float32 `[N]`."""
    if settings.top_entropy_quantile >= 1:
        return places.mask.astype(jnp.float32)
    groups = {"group": places.group, "groups": len(places.micro_batch)}
    return entropy_mask(entropies, places.mask, settings.top_entropy_quantile, **groups).astype(jnp.float32)


def _token_factors(
    settings: PolicyLoss, policies: Policies, sampled: jax.Array, correction: jax.Array | None
) -> jax.Array | float:
    """The factor of each token's loss, `[N]`, by the off-policy mask and the sampler's correction."""
    places, factor = policies.places, 1.0
    if settings.off_policy_mask_threshold is not None:
        threshold = settings.off_policy_mask_threshold
        kept = off_policy_mask(policies.logps, sampled, policies.advantages, threshold, places)
        factor *= places.spread(kept.astype(jnp.float32))
    if correction is not None and settings.loss_type != "vespo":
        factor *= places.spread(correction) if settings.corrects_sequences else correction
    return factor
