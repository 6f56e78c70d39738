"""Policy gradient losses on sampled completions: GRPO and its variants, and RLOO. Pure functions of arrays.

    rewards -> `group_advantages` or `rloo_advantages` -> `grpo_loss` or `rloo_loss` -> (loss, sums for the metrics)

Token arrays are flat, `[N]`; `text` `[N]` gives the completion (one of X) that each token belongs to. Where documented,
`[X, T]` with one row per completion also works.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.core.trainers import GRPO_LOSSES
from trl_jax.losses.advantages import Advantages as Advantages
from trl_jax.losses.advantages import group_advantages as group_advantages
from trl_jax.losses.advantages import rloo_advantages as rloo_advantages
from trl_jax.losses.supervised import of_all_shards, of_texts, summed

Sums = dict[str, jax.Array]


# Settings

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # loss types with the clipped surrogate
PER_GENERATION = ("dapo", "cispo", "vespo")  # loss types divided by the token count of a generation batch
SamplerCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True)
class PolicyLoss:
    r"""Settings of `grpo_loss`, named as in TRL.

    With $l$ the log-probability of a token, $\rho = \exp(l - l_{old})$ its ratio, $A$ its completion's advantage and
    $sg$ the stop-gradient, the loss of a token is:

    | loss_type | loss of a token | from |
    | --- | --- | --- |
    | grpo, bnpo, dr_grpo, dapo, luspo | $-\min(\min(\rho, \delta) A, clip(\rho, 1 - \epsilon, 1 + \epsilon_h) A)$ |
      GRPO, arXiv:2402.03300, eq. 3; $\delta$ of INTELLECT-2, arXiv:2505.07291 |
    | cispo | $-sg(\min(\rho, \epsilon_h)) A\, l$ | MiniMax-M1, arXiv:2506.13585; ScaleRL, arXiv:2510.13786 |
    | sapo | $-\frac{4}{\tau} \sigma(\tau (\rho - 1)) A$, $\tau$ by the sign of $A$ | SAPO, arXiv:2511.20347 |
    | vespo | $-sg(e^\lambda w^k e^{-\lambda w}) A\, l$ with $w = \prod_t \rho_t$ | VESPO, arXiv:2602.10693 |

    The step's loss is a mean of these: over each completion, then over completions (grpo, sapo); over the tokens of a
    micro-batch (bnpo, arXiv:2506.02864); over completions, each counted as `max_completion_length` tokens (dr_grpo,
    arXiv:2503.20783); over the tokens of the whole generation batch (dapo, arXiv:2503.14476, eq. 8; cispo, vespo); or a
    sum over each completion, then a mean over completions (luspo, arXiv:2602.05261). See `token_weights`.

    Args:
        epsilon, epsilon_high: how far the ratio may move below and above 1; epsilon_high=None means epsilon. For cispo,
            epsilon_high itself is the upper clip of the ratio.
        delta: upper clip of the ratio for negative advantages; None: unbounded.
        beta: coefficient of the KL divergence from the reference, `kl_k3`, added to each token's loss.
        use_bias_correction_kl: multiply the KL term by the ratio (DeepSeek-V3.2, arXiv:2512.02556).
        importance_sampling_level: "token", or "sequence": the ratio of the whole completion, the geometric mean over
            its tokens (GSPO, arXiv:2507.18071).
        off_policy_mask_threshold: drop completions with a negative advantage whose mean log-ratio of sampler to policy
            exceeds this (DeepSeek-V3.2, eq. 9); None: keep all.
        top_entropy_quantile: the fraction of a micro-batch's tokens, those with the highest entropy, that the loss
            includes (arXiv:2506.01939). The KL term includes all tokens.
        sapo_temperature_neg, sapo_temperature_pos: tau for advantages <= 0 and > 0.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: for advantages >= 0 and < 0.
        max_completion_length: the constant divisor of dr_grpo.
        sampler_correction: multiply the loss by the ratio of the old policy to the sampler (`sampler_ratio`), per
            "token" or per "sequence". A ratio outside [sampler_clip_min, sampler_clip_max] is clipped ("truncate") or
            set to 0 ("mask"). None: no correction.
    """

    loss_type: str = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    importance_sampling_level: str = "token"
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    max_completion_length: int = 512
    sampler_correction: SamplerCorrection | None = None
    sampler_clip_min: float | None = None
    sampler_clip_max: float | None = 3.0

    def __post_init__(self):
        if self.loss_type not in GRPO_LOSSES:
            raise ValueError(f"Unknown loss type: {self.loss_type}. Should be one of {list(GRPO_LOSSES)}")
        if self.importance_sampling_level not in ("token", "sequence"):
            raise ValueError(
                f"Unknown importance sampling level: {self.importance_sampling_level}. Possible values are 'token' and "
                "'sequence'."
            )

    @property
    def highest(self) -> float:
        """epsilon_high, or epsilon if that is None."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def of_sequences(self) -> bool:
        """Whether ratios are per completion rather than per token."""
        return self.importance_sampling_level == "sequence"

    @property
    def corrects_sequences(self) -> bool:
        """Whether the sampler correction is one number per completion."""
        return self.sampler_correction is not None and self.sampler_correction.startswith("sequence")

    def bounded(self, ratio: Any) -> Any:
        """Truncate or mask ratios of policy to sampler, according to `sampler_correction`: an array like `ratio`."""
        xp = jnp if isinstance(ratio, jax.Array) else np
        least = -math.inf if self.sampler_clip_min is None else self.sampler_clip_min
        most = math.inf if self.sampler_clip_max is None else self.sampler_clip_max
        if self.sampler_correction.endswith("truncate"):
            return xp.where(ratio < least, least, xp.where(ratio > most, most, ratio)).astype(ratio.dtype)
        return xp.where((ratio < least) | (ratio > most), 0, ratio).astype(ratio.dtype)


DEFAULTS = PolicyLoss()


# GRPO and its variants


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
    r"""Loss of X completions according to `settings`, and sums for TRL's metrics.

    $$ \sum_t w_t (x_t + \beta\, \mathrm{KL}_t) - c \bar H $$

    where $w$ comes from `token_weights`, $x$ is the token loss of `PolicyLoss` times the masks and the sampler
    correction, $c$ is the entropy coefficient, and $\bar H$ is the mean over micro-batches of the mean entropy of the
    tokens that `entropy_mask` keeps.

    One forward pass may hold completions of several micro-batches, and a micro-batch may be split over several passes.
    Exceptions: top_entropy_quantile < 1 and an entropy bonus require each micro-batch in a single pass.

    Args:
        logps: log-probabilities of the policy's tokens at the sampling temperature, `[N]`, or `[X, T]` without `text`.
            `mask`, `old_logps`, `ref_logps`, `entropies` and `sampling_logps` have the same shape.
        advantages: `[X]`.
        mask: which tokens to include; None: every token of a completion.
        old_logps: under the policy that sampled the completions. None: this policy sampled them.
        ref_logps: under the reference; required if beta is not 0.
        entropies: of the policy at each token, with gradient; required for top_entropy_quantile < 1.0 and for an
            entropy bonus. None: no entropy metric.
        sampling_logps: as reported by the sampler, NaN if it did not; required by sampler_correction. Without
            them, the off-policy mask uses old_logps.
        text: int32 `[N]`, the completion of each token; X for padding.
        token_weight: `[X]`, from `token_weights`. None: computed as if these completions were the whole step and the
            whole generation batch.
        completion_weight: `[X]`, as in `token_weights`; 0 for padding. None: equal weight for all micro-batches, and
            for the completions within each.
        micro_batch: bool `[M, X]`; None: one micro-batch with all completions.
        entropy_coef: coefficient of the entropy bonus, 0 while an adaptive bonus is off; None: no bonus.

    Returns:
        The loss, a float32 scalar, and sums `[M]` per micro-batch: `completions` (their count), `completion_weight`,
        `tokens`, `policy_loss`, and depending on the settings `kl`, `entropy`, `bonus_entropy` and `bonus_tokens`,
        `clipped_low`, `clipped_high`, `clipped`, the extremes over completions `low_min` (inf if there is none) and
        `high_max` (-inf), `cispo_clipped`, `phi`. Sums of clipped ratios and of phi run over tokens, or over
        completions if ratios are per completion.
    """
    groups = token_groups(logps, mask, text, micro_batch, len(advantages))
    logps, old, ref, entropies, sampling = (
        _masked(values, groups) for values in (logps, old_logps, ref_logps, entropies, sampling_logps)
    )
    old = jax.lax.stop_gradient(logps) if old is None else old
    completion_weight = groups.equal_weight if completion_weight is None else completion_weight
    if token_weight is None:
        token_weight = token_weights(settings, groups.lengths, completion_weight, groups.micro_batch)
    policies = Policies(logps, old, advantages.astype(jnp.float32), groups)
    unmasked = _entropy_mask(settings, entropies, groups)
    losses, sums = _token_losses(settings, policies, ref, sampling, unmasked)
    losses = token_weight * groups.total(losses)
    sums |= {
        "completions": groups.by_completion(jnp.ones(len(advantages))),
        "tokens": groups.by_completion(groups.lengths),
        "completion_weight": groups.by_completion(completion_weight),
        "policy_loss": groups.by_completion(losses),
    }
    if entropies is not None:
        sums["entropy"] = groups.by_token(entropies)
    loss = jnp.sum(losses)
    if entropy_coef is not None:
        sums |= {"bonus_entropy": groups.by_token(entropies * unmasked), "bonus_tokens": groups.by_token(unmasked)}
        loss -= entropy_coef * _mean_entropy(sums)
    return loss, jax.lax.stop_gradient(sums)


def _mean_entropy(sums: Sums) -> jax.Array:
    means = sums["bonus_entropy"] / jnp.maximum(sums["bonus_tokens"], 1)
    return jnp.sum(sums["completion_weight"] * means)


def _token_losses(
    settings: PolicyLoss, policies: Policies, ref: jax.Array | None, sampling: jax.Array | None, unmasked: jax.Array
) -> tuple[jax.Array, Sums]:
    """Per-token loss, `[N]`: the surrogate times the masks and the sampler correction, plus the KL term."""
    groups, old, correction = policies.groups, policies.old_logps, None
    if settings.sampler_correction is not None:
        completions = len(policies.advantages)
        correction = sampler_ratio(old, sampling, groups.mask, groups.text, completions, settings=settings)
    losses, sums = surrogate(settings, policies, correction)
    losses *= _token_factors(settings, policies, old if sampling is None else sampling, correction) * unmasked
    if settings.beta:
        kl = kl_k3(policies.logps, ref)
        if settings.use_bias_correction_kl:
            kl *= policies.of_tokens(settings, policies.ratio(settings))
        losses += settings.beta * kl
        sums["kl"] = groups.by_token(kl)
    return losses, sums


def _masked(values: jax.Array | None, groups: TokenGroups) -> jax.Array | None:
    """Float32 `[N]`, 0 for masked tokens: these affect neither values nor gradients, even if they are NaN."""
    return None if values is None else jnp.where(groups.mask, values.reshape(-1).astype(jnp.float32), 0)


def _entropy_mask(settings: PolicyLoss, entropies: jax.Array | None, groups: TokenGroups) -> jax.Array:
    """1 for tokens that pass the entropy mask, float32 `[N]`."""
    if settings.top_entropy_quantile >= 1:
        return groups.mask.astype(jnp.float32)
    by_group = {"group": groups.group, "groups": len(groups.micro_batch)}
    return entropy_mask(entropies, groups.mask, settings.top_entropy_quantile, **by_group).astype(jnp.float32)


def _token_factors(
    settings: PolicyLoss, policies: Policies, sampled: jax.Array, correction: jax.Array | None
) -> jax.Array | float:
    """Factor of each token's loss, `[N]`, from the off-policy mask and the sampler correction."""
    groups, factor = policies.groups, 1.0
    if settings.off_policy_mask_threshold is not None:
        threshold = settings.off_policy_mask_threshold
        keep = off_policy_mask(policies.logps, sampled, policies.advantages, threshold, groups)
        factor *= groups.spread(keep.astype(jnp.float32))
    if correction is not None and settings.loss_type != "vespo":
        factor *= groups.spread(correction) if settings.corrects_sequences else correction
    return factor


# RLOO


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
    r"""Clipped loss of X completions, each one action (RLOO, arXiv:2402.14740, section 3.2, with PPO's clipping).

    $$ -\sum_i w_i \min(\rho_i A_i, clip(\rho_i, 1 - \epsilon, 1 + \epsilon_{high}) A_i),
       \quad \rho_i = \exp(\sum_t l_{it} - l_{old, i}) $$

    where $w$ is `completion_weight`. One forward pass may hold completions of several micro-batches, and a micro-batch
    may be split over several passes.

    Args:
        logps: log-probabilities of the policy's tokens, `[N]`, or `[X, T]` without `text`. `mask` and `entropies` have
            the same shape.
        old_logps: `[X]`, the log-probability of each whole completion under the policy that sampled it.
        advantages: `[X]`.
        mask, entropies, text, completion_weight, micro_batch: as in `grpo_loss`.

    Returns:
        The loss, a float32 scalar, and sums `[M]` per micro-batch: `completions` (their count), `tokens`, `entropy`,
        `clipped_low`, `clipped_high` and `clipped` over completions, and the extremes `low_min` (inf if there is no
        completion) and `high_max` (-inf).
    """
    groups = token_groups(logps, mask, text, micro_batch, len(advantages))
    completion_weight = groups.equal_weight if completion_weight is None else completion_weight
    advantages = advantages.astype(jnp.float32)
    ratio = jnp.exp(groups.total(logps.reshape(-1)) - old_logps)
    least, most = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    losses = -jnp.minimum(ratio * advantages, clipped(ratio, least, most) * advantages)
    low = ((ratio < least) & (advantages < 0)).astype(jnp.float32)
    high = ((ratio > most) & (advantages > 0)).astype(jnp.float32)
    sums = {
        "completions": groups.by_completion(jnp.ones(len(advantages))),
        "tokens": groups.by_completion(groups.lengths),
        "clipped_low": groups.by_completion(low),
        "clipped_high": groups.by_completion(high),
        "clipped": groups.by_completion(low + high),
        "low_min": jnp.min(jnp.where(groups.micro_batch, low, jnp.inf), axis=-1),
        "high_max": jnp.max(jnp.where(groups.micro_batch, high, -jnp.inf), axis=-1),
    }
    if entropies is not None:
        sums["entropy"] = groups.by_token(entropies.reshape(-1))
    return jnp.sum(completion_weight * losses), jax.lax.stop_gradient(sums)


# Per-token surrogate losses


class Policies(NamedTuple):
    """Log-probabilities `[N]` under the policy and the policy that sampled, advantages `[X]`, and token groups."""

    logps: jax.Array
    old_logps: jax.Array
    advantages: jax.Array
    groups: TokenGroups

    def ratio(self, settings: PolicyLoss) -> jax.Array:
        """Policy ratio: per token `[N]`, or per completion `[X]` (geometric mean over its tokens)."""
        difference = self.logps - self.old_logps
        return jnp.exp(self.groups.mean(difference) if settings.of_sequences else difference)

    def of_tokens(self, settings: PolicyLoss, values: jax.Array) -> jax.Array:
        """Spread per-ratio values to the tokens, `[N]`."""
        return self.groups.spread(values) if settings.of_sequences else values

    def sums(self, settings: PolicyLoss, values: jax.Array) -> jax.Array:
        """Sum per-ratio values over each micro-batch, `[M]`."""
        return (self.groups.by_completion if settings.of_sequences else self.groups.by_token)(values)


def surrogate(settings: PolicyLoss, policies: Policies, correction: jax.Array | None) -> tuple[jax.Array, Sums]:
    """Per-token losses `[N]` for `settings.loss_type`, and sums `[M]` of what was clipped or weighted.

    Args:
        correction: the result of `sampler_ratio`; only vespo uses it here.
    """
    logps, advantages = policies.logps, policies.groups.spread(policies.advantages)
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
    phi = gamma_weights(logps - policies.old_logps, policies.advantages, correction, settings, policies.groups)
    return -policies.groups.spread(phi) * advantages * logps, {"phi": policies.groups.by_completion(phi)}


def _capped_sums(settings: PolicyLoss, policies: Policies) -> Sums:
    high, _ = _clip_indicators(settings, policies, settings.highest, -jnp.inf)
    return {"cispo_clipped": policies.sums(settings, high)}


def _clipped_sums(settings: PolicyLoss, policies: Policies) -> Sums:
    groups = policies.groups
    high, low = _clip_indicators(settings, policies, 1 + settings.highest, 1 - settings.epsilon)
    compared = groups.micro_batch if settings.of_sequences else groups.micro_batch & (groups.lengths > 0)
    lows, highs = (low, high) if settings.of_sequences else (groups.mean(low), groups.mean(high))
    return {
        "clipped_low": policies.sums(settings, low),
        "clipped_high": policies.sums(settings, high),
        "clipped": policies.sums(settings, low + high),
        "low_min": jnp.min(jnp.where(compared, lows, jnp.inf), axis=-1),
        "high_max": jnp.max(jnp.where(compared, highs, -jnp.inf), axis=-1),
    }


def _clip_indicators(
    settings: PolicyLoss, policies: Policies, most: float, least: float
) -> tuple[jax.Array, jax.Array]:
    """Indicators, 1 or 0: whether the ratio (after delta) exceeds `most` with a positive advantage, and whether it is
    below `least` with a negative advantage."""
    ratio, advantages = policies.ratio(settings), policies.advantages
    if settings.loss_type in CLIPPED:
        ratio = clipped(ratio, most=settings.delta)
    if not settings.of_sequences:
        advantages = policies.groups.spread(advantages)
    high, low = (ratio > most) & (advantages > 0), (ratio < least) & (advantages < 0)
    return high.astype(jnp.float32), low.astype(jnp.float32)


# Ratios, and the weights and divergences computed from them

MIN_LOG, MAX_LOG = math.log(1e-8), 20.0  # bounds of VESPO's log weights


def kl_k3(logps: jax.Array, ref_logps: jax.Array) -> jax.Array:
    r"""Per-token estimate of KL(policy || reference), never negative; any shape.

    $$ \frac{\pi_{ref}}{\pi} - \log \frac{\pi_{ref}}{\pi} - 1 $$

    This is the k3 estimator (Schulman 2020, "Approximating KL Divergence"; GRPO, arXiv:2402.03300, eq. 4).
    """
    ratio = ref_logps - logps
    return jnp.exp(ratio) - ratio - 1


def clipped(values: jax.Array, least: float | None = None, most: float | None = None) -> jax.Array:
    """Clip values to bounds. At a bound the gradient passes through, as in torch; jnp.clip would halve it."""
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
    """Ratio of the old policy to the policy that sampled the tokens, truncated or masked according to `settings`.

    Truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training") or masked (Liu et al. 2025, "When Speed Kills Stability"). A token whose sampling log-probability is NaN
    (the sampler did not report it) has ratio 1.

    Args:
        old_logps, sampling_logps, mask: `[N]` with `text` `[N]` and the number of completions X; or `[X, T]`.

    Returns:
        `[N]` for token_* corrections (X T for `[X, T]` inputs), 1 where the mask is 0; `[X]` for sequence_*.
    """
    completions = len(old_logps) if completions is None else completions
    groups = token_groups(old_logps, mask, text, None, completions)
    difference = groups.difference(old_logps, sampling_logps)
    if settings.corrects_sequences:
        difference = groups.total(difference)
    return settings.bounded(jnp.exp(difference))


def off_policy_mask(
    logps: jax.Array, sampling_logps: jax.Array, advantages: jax.Array, threshold: float, groups: TokenGroups
) -> jax.Array:
    """Which completions to keep, bool `[X]`: those with a non-negative advantage, and those whose mean log-ratio of
    sampler to policy is at most `threshold` (DeepSeek-V3.2, arXiv:2512.02556, eq. 9)."""
    divergence = groups.mean(groups.difference(sampling_logps, jax.lax.stop_gradient(logps)))
    return (advantages >= 0) | (divergence <= threshold)


def gamma_weights(
    log_ratio: jax.Array, advantages: jax.Array, correction: jax.Array | None, settings: PolicyLoss, groups: TokenGroups
) -> jax.Array:
    r"""VESPO's weight per completion, `[X]`: $e^\lambda w^k e^{-\lambda w}$, which is 1 at $w = 1$
    (arXiv:2602.10693). No gradient flows through it.

    Args:
        log_ratio: `[N]`; $w$ is the product of the token ratios.
        correction: the result of `sampler_ratio`, a further factor of $w$.
    """
    log_w = groups.total(jnp.clip(log_ratio, -MAX_LOG, MAX_LOG))
    if correction is not None:
        logs = jnp.clip(jnp.log(correction), MIN_LOG, MAX_LOG)
        log_w += logs if settings.corrects_sequences else groups.total(logs)
    log_w = jnp.clip(log_w, MIN_LOG, MAX_LOG)
    k = jnp.where(advantages >= 0, settings.vespo_k_pos, settings.vespo_k_neg)
    decay = jnp.where(advantages >= 0, settings.vespo_lambda_pos, settings.vespo_lambda_neg)
    decay = jnp.maximum(decay, 1e-4)
    phi = jnp.exp(decay + k * log_w - decay * jnp.exp(log_w))
    return jax.lax.stop_gradient(jnp.nan_to_num(phi, nan=0.0, posinf=0.0, neginf=0.0))


# Divisors of the policy losses, expressed as token weights


def token_weights(
    settings: PolicyLoss,
    lengths: Any,
    completion_weight: Any,
    micro_batch: Any,
    *,
    generated_tokens: Any = None,
    part: Any = 1.0,
) -> Any:
    r"""Weight of each token of a completion, `[X]`: the step's loss is the sum over tokens of weight times loss.

    | loss_type | weight |
    | --- | --- |
    | grpo, sapo | completion_weight / max(length, 1) |
    | luspo | completion_weight |
    | dr_grpo | completion_weight / max_completion_length |
    | bnpo | sum of the micro-batch's completion_weight / max(its tokens, 1) |
    | dapo, cispo, vespo | 1 / (max(generated_tokens, 1) part) |

    Args:
        lengths: `[X]`, the number of unmasked tokens of each completion.
        completion_weight: `[X]`, the weight of each completion in a mean over the step's micro-batches (on all devices)
            of means over their completions: `1 / (completions in its micro-batch x micro-batches x devices)`. In an
            evaluation the batch is one micro-batch.
        micro_batch: bool `[M, X]`, the completions in each micro-batch on this device.
        generated_tokens: the number of unmasked tokens in the whole generation batch (in an evaluation, in the batch),
            on all devices. None: counted from these completions.
        part: micro-batches per step / micro-batches per generation; 1 in an evaluation. The divisor is therefore the
            mean token count per step rather than this step's count, as in TRL.

    Returns:
        Float32; a NumPy array if `lengths` is one.
    """
    xp = jnp if isinstance(lengths, jax.Array) else np
    completion_weight = xp.asarray(completion_weight, xp.float32)
    if settings.loss_type in PER_GENERATION:
        tokens = xp.sum(lengths) if generated_tokens is None else generated_tokens
        return xp.where(completion_weight > 0, 1 / (xp.maximum(tokens, 1) * part), 0).astype(xp.float32)
    if settings.loss_type == "luspo":
        return completion_weight
    if settings.loss_type == "dr_grpo":
        return completion_weight / settings.max_completion_length
    if settings.loss_type == "bnpo":
        tokens, weights = (xp.sum(xp.where(micro_batch, values, 0), axis=1) for values in (lengths, completion_weight))
        per_micro_batch = weights / xp.maximum(tokens, 1)
        return xp.sum(xp.where(micro_batch, per_micro_batch[:, None], 0), axis=0).astype(xp.float32)
    return completion_weight / xp.maximum(xp.asarray(lengths, xp.float32), 1)


# Entropy: the mask of high-entropy tokens, and the adaptive bonus coefficient


def entropy_mask(
    entropies: jax.Array,
    mask: jax.Array,
    top_entropy_quantile: float,
    *,
    group: jax.Array | None = None,
    groups: int = 1,
) -> jax.Array:
    """Which tokens have an entropy at or above the `1 - top_entropy_quantile` quantile: bool, in the shape of
    `entropies` ("Beyond the 80/20 Rule", arXiv:2506.01939, section 5).

    The quantile is taken over the unmasked tokens of all devices, with linear interpolation as in torch.quantile.

    Args:
        entropies: `[N]`, or any shape.
        mask: which tokens to include, in the same shape.
        top_entropy_quantile: the fraction of tokens to keep, from 0.0 (only the highest) to 1.0.
        group: int32, in the same shape: the micro-batch of each token, from 0 to `groups` - 1. Each token is compared
            with the quantile of its own micro-batch.
    """
    values = jax.lax.stop_gradient(entropies).reshape(-1).astype(jnp.float32)
    valid = mask.reshape(-1) != 0
    group_index = jnp.where(valid, 0 if group is None else group.reshape(-1), groups)
    quantile = _quantiles(of_all_shards(values), of_all_shards(group_index), 1 - top_entropy_quantile, groups)
    return (valid & (values >= jnp.append(quantile, jnp.inf)[group_index])).reshape(entropies.shape)


def _quantiles(values: jax.Array, group: jax.Array, quantile: float, groups: int) -> jax.Array:
    """The quantile of each group's values, `[groups]`. Values whose group is `groups` are ignored."""
    group, values = jax.lax.sort((group, values), num_keys=2)
    sizes = jnp.zeros(groups + 1, jnp.int32).at[group].add(1)
    start = (jnp.cumsum(sizes) - sizes)[:-1]
    rank = jnp.float32(quantile) * jnp.maximum(sizes[:-1] - 1, 0).astype(jnp.float32)
    below, above = (values[start + end.astype(jnp.int32)] for end in (jnp.floor(rank), jnp.ceil(rank)))
    part = rank - jnp.floor(rank)  # the interpolation matches torch.lerp bit for bit
    return jnp.where(part < 0.5, below + part * (above - below), above - (above - below) * (1 - part))


def next_entropy_coef(
    coef: float, entropy: float, *, target: float, delta: float = 0.005, least: float = 0.0, most: float = 1.0
) -> float:
    """The coefficient of the adaptive entropy bonus after a step (Skywork-OR1, arXiv:2505.22312, section 4).

    It rises by `delta` if the step's mean entropy is at most `target` and falls by `delta` otherwise, within bounds. A
    step applies the coefficient only if the previous step's mean entropy was at most the target.
    """
    return min(coef + delta, most) if entropy <= target else max(coef - delta, least)


# Groups of tokens, and sums over completions and micro-batches


class TokenGroups(NamedTuple):
    """How N tokens are grouped into X completions and M micro-batches.

    text: int32 `[N]`, the completion of each token; X for padding.
    mask: bool `[N]`, which tokens to include.
    micro_batch: bool `[M, X]`, the completions in each micro-batch; padding completions are in none.
    """

    text: jax.Array
    mask: jax.Array
    micro_batch: jax.Array

    @property
    def lengths(self) -> jax.Array:
        """The number of unmasked tokens of each completion, float32 `[X]`."""
        return self.total(jnp.ones(len(self.text)))

    @property
    def equal_weight(self) -> jax.Array:
        """Weight of each completion in a mean over micro-batches of means over their completions, `[X]`."""
        per_micro_batch = 1 / jnp.maximum(jnp.sum(self.micro_batch, axis=1), 1) / len(self.micro_batch)
        return jnp.sum(jnp.where(self.micro_batch, per_micro_batch[:, None], 0), axis=0)

    @property
    def group(self) -> jax.Array:
        """The micro-batch of each token, int32 `[N]`; M for masked tokens."""
        is_real = jnp.any(self.micro_batch, axis=0)
        text_group = jnp.where(is_real, jnp.argmax(self.micro_batch, axis=0), len(self.micro_batch))
        return jnp.where(self.mask, self.spread(text_group), len(self.micro_batch))

    def total(self, values: jax.Array) -> jax.Array:
        """Sum `[N]` values over each completion: `[X]`."""
        return of_texts(jnp.where(self.mask, values, 0), self.text, self.micro_batch.shape[1])

    def mean(self, values: jax.Array) -> jax.Array:
        """Mean of `[N]` values over each completion, `[X]`; 0 for a completion whose tokens are all masked."""
        return self.total(values) / jnp.maximum(self.lengths, 1)

    def spread(self, values: jax.Array) -> jax.Array:
        """Give each token its completion's value: `[X]` to `[N]`."""
        return values.at[self.text].get(mode="fill", fill_value=0)

    def difference(self, values: jax.Array, others: jax.Array) -> jax.Array:
        """`values - others`, `[N]`; 0 for masked tokens and if either value is NaN."""
        values, others = values.reshape(-1), others.reshape(-1)
        valid = self.mask & ~jnp.isnan(values) & ~jnp.isnan(others)
        return jnp.where(valid, values, 0) - jnp.where(valid, others, 0)

    def by_token(self, values: jax.Array) -> jax.Array:
        """Sum `[N]` values over the tokens of each micro-batch: `[M]`."""
        return summed(self.total(values), self.micro_batch)

    def by_completion(self, values: jax.Array) -> jax.Array:
        """Sum `[X]` values over the completions of each micro-batch: `[M]`."""
        return summed(values, self.micro_batch)


def token_groups(
    logps: jax.Array, mask: jax.Array | None, text: jax.Array | None, micro_batch: jax.Array | None, completions: int
) -> TokenGroups:
    """Build `TokenGroups` for `logps`, `[N]` with `text`, or `[X, T]` without (one row per completion).

    Args:
        mask: in the shape of `logps`; None: every token of a completion is included.
        micro_batch: None: all completions form one micro-batch.
    """
    if text is None:
        text = jnp.repeat(jnp.arange(completions), logps.size // max(completions, 1))
    valid = text < completions if mask is None else (text < completions) & (mask.reshape(-1) != 0)
    one_micro_batch = jnp.ones((1, completions), bool)
    return TokenGroups(text, valid, one_micro_batch if micro_batch is None else micro_batch)
