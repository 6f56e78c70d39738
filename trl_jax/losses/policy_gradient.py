"""Policy gradient losses of sampled completions: GRPO, its variants, and RLOO. Pure functions of arrays.

    rewards -> `group_advantages` or `rloo_advantages` -> `grpo_loss` or `rloo_loss` -> (loss, sums for the metrics)

Arrays of tokens are flat, `[N]`, with `text` `[N]` to say which of X completions a token belongs to. Functions that say
so take `[X, T]` as well, one row per completion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.losses.advantages import Advantages as Advantages
from trl_jax.losses.advantages import group_advantages as group_advantages
from trl_jax.losses.advantages import rloo_advantages as rloo_advantages
from trl_jax.losses.names import GRPO_LOSSES
from trl_jax.losses.supervised import of_all_shards, of_texts, summed

# ----------------------------------------------------------------------------------------------------
# RLOO's loss.


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


# ----------------------------------------------------------------------------------------------------
# The surrogate losses of tokens, whose gradient is the policy's.


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


# ----------------------------------------------------------------------------------------------------
# Ratios of policies, and the weights and divergences that are made of them.


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


# ----------------------------------------------------------------------------------------------------
# The divisors of policy losses, as the weight that the loss of a token has in the step's.


def token_weights(
    settings: PolicyLoss,
    lengths: Any,
    completion_weight: Any,
    micro_batch: Any,
    *,
    generated_tokens: Any = None,
    part: Any = 1.0,
) -> Any:
    r"""The weight `[X]` of each token of a completion: the step's loss is the sum over tokens of weight times loss.

    | loss_type | weight |
    | --- | --- |
    | grpo, sapo | completion_weight / max(length, 1) |
    | luspo | completion_weight |
    | dr_grpo | completion_weight / max_completion_length |
    | bnpo | sum of the micro-batch's completion_weight / max(its tokens, 1) |
    | dapo, cispo, vespo | 1 / (max(generated_tokens, 1) part) |

    Args:
        lengths: `[X]`, tokens that count of each completion.
        completion_weight: `[X]`, of each in a mean over a step's micro-batches, on all devices, of means over their
            completions: `1 / (completions of its micro-batch x micro-batches x devices)`. An evaluation's batch is one
            micro-batch.
        micro_batch: bool `[M, X]`, the completions of each micro-batch of a device.
        generated_tokens: the tokens that count of the whole generation, on all devices; of an evaluation's batch. None:
            of these completions.
        part: micro-batches of the step / micro-batches of the generation; 1 in an evaluation. So the divisor is the
            mean count of a step's tokens and not this step's, as in TRL.

    Returns:
        Float32, of NumPy if `lengths` is.
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
        of_micro_batch = weights / xp.maximum(tokens, 1)
        return xp.sum(xp.where(micro_batch, of_micro_batch[:, None], 0), axis=0).astype(xp.float32)
    return completion_weight / xp.maximum(xp.asarray(lengths, xp.float32), 1)


# ----------------------------------------------------------------------------------------------------
# The entropy of a policy's tokens: which of them are uncertain, and how much uncertainty is rewarded.


def entropy_mask(
    entropies: jax.Array,
    mask: jax.Array,
    top_entropy_quantile: float,
    *,
    group: jax.Array | None = None,
    groups: int = 1,
) -> jax.Array:
    """Which tokens have an entropy at or above the quantile `1 - top_entropy_quantile` of the tokens that count: bool,
    in the shape of `entropies` ("Beyond the 80/20 Rule", arXiv:2506.01939, section 5).

    The quantile lies between two values as torch.quantile's does, by linear interpolation. On several devices the
    tokens are those of all.

    Args:
        entropies: `[N]`, or any shape.
        mask: which tokens count, in the same shape.
        top_entropy_quantile: the share of tokens to keep, from 0.0 (the highest alone) to 1.0.
        group: int32, in the same shape: the micro-batch of each token, from 0 to `groups` - 1, whose own quantile it is
            compared with.
    """
    values = jax.lax.stop_gradient(entropies).reshape(-1).astype(jnp.float32)
    valid = mask.reshape(-1) != 0
    of_group = jnp.where(valid, 0 if group is None else group.reshape(-1), groups)
    quantile = _quantiles(of_all_shards(values), of_all_shards(of_group), 1 - top_entropy_quantile, groups)
    return (valid & (values >= jnp.append(quantile, jnp.inf)[of_group])).reshape(entropies.shape)


def _quantiles(values: jax.Array, group: jax.Array, quantile: float, groups: int) -> jax.Array:
    """The quantile of each group's values, `[groups]`; values of the group `groups` are of none."""
    group, values = jax.lax.sort((group, values), num_keys=2)
    sizes = jnp.zeros(groups + 1, jnp.int32).at[group].add(1)
    start = (jnp.cumsum(sizes) - sizes)[:-1]
    rank = jnp.float32(quantile) * jnp.maximum(sizes[:-1] - 1, 0).astype(jnp.float32)
    below, above = (values[start + end.astype(jnp.int32)] for end in (jnp.floor(rank), jnp.ceil(rank)))
    part = rank - jnp.floor(rank)  # and as torch.lerp has it, to the last bit
    return jnp.where(part < 0.5, below + part * (above - below), above - (above - below) * (1 - part))


def next_entropy_coef(
    coef: float, entropy: float, *, target: float, delta: float = 0.005, least: float = 0.0, most: float = 1.0
) -> float:
    """The coefficient of the entropy bonus after a step: up by `delta` where the step's mean entropy is at most
    `target`, otherwise down, within bounds (Skywork-OR1, arXiv:2505.22312, section 4). A step applies it where the mean
    entropy of the step before is at most the target."""
    return min(coef + delta, most) if entropy <= target else max(coef - delta, least)


# ----------------------------------------------------------------------------------------------------
# The tokens that a policy's loss reads, and sums over completions and micro-batches.


class Reads(NamedTuple):
    """N tokens of X completions in M micro-batches.

    text: int32 `[N]`, the completion of each token, X of one that only fills the shape.
    mask: bool `[N]`, which tokens count.
    micro_batch: bool `[M, X]`, the completions of each micro-batch; one that only fills the shape is in none.
    """

    text: jax.Array
    mask: jax.Array
    micro_batch: jax.Array

    @property
    def lengths(self) -> jax.Array:
        """Tokens that count of each completion, float32 `[X]`."""
        return self.total(jnp.ones(len(self.text)))

    @property
    def equal_weight(self) -> jax.Array:
        """The weight of each completion in a mean over micro-batches of means over their completions, `[X]`."""
        of_micro_batch = 1 / jnp.maximum(jnp.sum(self.micro_batch, axis=1), 1) / len(self.micro_batch)
        return jnp.sum(jnp.where(self.micro_batch, of_micro_batch[:, None], 0), axis=0)

    @property
    def group(self) -> jax.Array:
        """The micro-batch of each token, int32 `[N]`; M of one that does not count."""
        within = jnp.any(self.micro_batch, axis=0)
        of_text = jnp.where(within, jnp.argmax(self.micro_batch, axis=0), len(self.micro_batch))
        return jnp.where(self.mask, self.spread(of_text), len(self.micro_batch))

    def total(self, values: jax.Array) -> jax.Array:
        """The sum over each completion, `[X]` of `[N]`."""
        return of_texts(jnp.where(self.mask, values, 0), self.text, self.micro_batch.shape[1])

    def mean(self, values: jax.Array) -> jax.Array:
        """The mean over each completion, 0 where nothing counts."""
        return self.total(values) / jnp.maximum(self.lengths, 1)

    def spread(self, values: jax.Array) -> jax.Array:
        """Each completion's value at its tokens, `[N]` of `[X]`."""
        return values.at[self.text].get(mode="fill", fill_value=0)

    def difference(self, values: jax.Array, others: jax.Array) -> jax.Array:
        """Their difference, `[N]`; 0 where a token does not count or either is NaN."""
        values, others = values.reshape(-1), others.reshape(-1)
        known = self.mask & ~jnp.isnan(values) & ~jnp.isnan(others)
        return jnp.where(known, values, 0) - jnp.where(known, others, 0)

    def by_token(self, values: jax.Array) -> jax.Array:
        """The sum over the tokens of each micro-batch, `[M]` of `[N]`."""
        return summed(self.total(values), self.micro_batch)

    def by_completion(self, values: jax.Array) -> jax.Array:
        """The sum over the completions of each micro-batch, `[M]` of `[X]`."""
        return summed(values, self.micro_batch)


def reads(
    logps: jax.Array, mask: jax.Array | None, text: jax.Array | None, micro_batch: jax.Array | None, completions: int
) -> Reads:
    """Where the tokens of `logps` belong, `[N]` with `text`, or `[X, T]` without: a row is then a completion.

    Args:
        mask: in the form of logps; None: all count that belong to a completion.
        micro_batch: None: all completions are one micro-batch.
    """
    if text is None:
        text = jnp.repeat(jnp.arange(completions), logps.size // max(completions, 1))
    valid = text < completions if mask is None else (text < completions) & (mask.reshape(-1) != 0)
    whole = jnp.ones((1, completions), bool)
    return Reads(text, valid, whole if micro_batch is None else micro_batch)


# ----------------------------------------------------------------------------------------------------
# The settings of a policy's loss, in TRL's names.


CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # those with the clipped surrogate
PER_GENERATION = ("dapo", "cispo", "vespo")  # those that divide by the tokens of a generation
SamplerCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True)
class PolicyLoss:
    r"""The loss of `grpo_loss`.

    With $l$ the log-probability of a token, $\rho = \exp(l - l_{old})$ its ratio, $A$ its completion's advantage and
    $sg$ a stopped gradient, the loss of a token is:

    | loss_type | loss of a token | from |
    | --- | --- | --- |
    | grpo, bnpo, dr_grpo, dapo, luspo | $-\min(\min(\rho, \delta) A, clip(\rho, 1 - \epsilon, 1 + \epsilon_h) A)$ |
      GRPO, arXiv:2402.03300, eq. 3; $\delta$ of INTELLECT-2, arXiv:2505.07291 |
    | cispo | $-sg(\min(\rho, \epsilon_h)) A\, l$ | MiniMax-M1, arXiv:2506.13585; ScaleRL, arXiv:2510.13786 |
    | sapo | $-\frac{4}{\tau} \sigma(\tau (\rho - 1)) A$, $\tau$ by the sign of $A$ | SAPO, arXiv:2511.20347 |
    | vespo | $-sg(e^\lambda w^k e^{-\lambda w}) A\, l$ with $w = \prod_t \rho_t$ | VESPO, arXiv:2602.10693 |

    and the step's is a mean of them: over each completion, then over completions (grpo, sapo); over the tokens of a
    micro-batch (bnpo, arXiv:2506.02864); over as many completions of `max_completion_length` tokens (dr_grpo,
    arXiv:2503.20783); over the tokens of the whole generation (dapo, arXiv:2503.14476, eq. 8; cispo, vespo); the sum
    over each completion, then the mean over completions (luspo, arXiv:2602.05261). `token_weights` has the divisors.

    Args:
        epsilon, epsilon_high: how far the ratio may go from 1; epsilon_high None: as epsilon. Of cispo, epsilon_high
            itself is the most that a ratio counts.
        delta: the most that the ratio counts, of a negative advantage too; None: no bound.
        beta: the factor of the divergence from the reference, `kl_k3`, that is added to each token's loss.
        use_bias_correction_kl: multiply that divergence by the ratio (DeepSeek-V3.2, arXiv:2512.02556).
        importance_sampling_level: "token", or "sequence": the ratio of a whole completion, the geometric mean of its
            tokens' (GSPO, arXiv:2507.18071).
        off_policy_mask_threshold: completions of a negative advantage whose mean log-ratio of sampler and policy is
            above do not count (DeepSeek-V3.2, eq. 9); None: all count.
        top_entropy_quantile: the share of a micro-batch's tokens that count, those of the highest entropy
            (arXiv:2506.01939); of the divergence all count.
        sapo_temperature_neg, sapo_temperature_pos: tau, of advantages up to 0 and above.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: of advantages from 0 on, and below.
        max_completion_length: the constant of dr_grpo.
        sampler_correction: multiply by the ratio of the old policy and what sampled (`sampler_ratio`): of each "token"
            or of the whole "sequence", which sampler_clip_min and sampler_clip_max truncate, or beyond which it is 0
            ("mask"). None: the policy itself sampled.
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
        """epsilon_high, or epsilon in its place."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def of_sequences(self) -> bool:
        """Whether ratios are those of whole completions."""
        return self.importance_sampling_level == "sequence"

    @property
    def corrects_sequences(self) -> bool:
        """Whether the sampler's correction is one number a completion."""
        return self.sampler_correction is not None and self.sampler_correction.startswith("sequence")


DEFAULTS = PolicyLoss()


# ----------------------------------------------------------------------------------------------------
# GRPO's loss and those that grew out of it.


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
