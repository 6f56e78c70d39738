"""DPO losses, computed from the log-probabilities of a policy and a reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

_REVERSE_KL_WITHIN = 1e-6  # if alpha is this close to 1, use the reverse KL divergence, which is the limit
_MAX_EXPONENT = 80.0  # largest exponent; exp(80) still fits in float32


class PairLogps(NamedTuple):
    """Log-probabilities and token counts of E pairs, float32 `[E]` each.

    chosen, rejected: the policy's log-probability of each completion, summed over its tokens.
    ref_chosen, ref_rejected: the same for the reference.
    chosen_tokens, rejected_tokens: the number of completion tokens. If a text has no prompt, its first token is
        included, although nothing predicts it.
    chosen_sum: as `chosen`, but without the LD-DPO weighting of `length_desensitised`.
    wpo_weight: WPO's weight of each pair; no gradient flows through it.
    chosen_targets: the number of predicted tokens in each chosen completion.
    """

    chosen: jax.Array
    rejected: jax.Array
    ref_chosen: jax.Array
    ref_rejected: jax.Array
    chosen_tokens: jax.Array
    rejected_tokens: jax.Array
    chosen_sum: jax.Array
    wpo_weight: jax.Array
    chosen_targets: jax.Array

    @property
    def ratios(self) -> tuple[jax.Array, jax.Array]:
        """log(policy / reference) of the chosen and of the rejected completions."""
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected


@dataclass(frozen=True)
class PreferenceLoss:
    r"""Weighted sum of the losses in `names`, under TRL's names.

    With $c$, $r$ the log-ratios of policy to reference for the chosen and the rejected completion, $u$ their scores
    under the divergence, $n$ their token counts, and $\Delta = u_c - u_r$:

    | name | loss of a pair | from |
    | --- | --- | --- |
    | sigmoid | $-\log \sigma(\beta \Delta)$ | DPO, arXiv:2305.18290, eq. 7 |
    | hinge | $\max(0, 1 - \beta \Delta)$ | SLiC, arXiv:2305.10425 |
    | ipo | $(u_c / n_c - u_r / n_r - 1 / 2 \beta)^2$ | IPO, arXiv:2310.12036, eq. 17; a token's mean |
    | exo_pair | $KL(\sigma(\pm \beta \Delta) \| 1 - \epsilon, \epsilon)$ | EXO, arXiv:2402.00856, eq. 16 |
    | nca_pair | $-\log \sigma(\beta c) - [\log \sigma(-\beta c) + \log \sigma(-\beta r)] / 2$ | NCA, arXiv:2402.05369 |
    | robust | $[-(1-\epsilon) \log \sigma(\beta \Delta) + \epsilon \log \sigma(-\beta \Delta)] / (1 - 2 \epsilon)$ |
      robust DPO, arXiv:2403.00409 |
    | bco_pair | $-\log \sigma(\beta c) - \log \sigma(-\beta r)$ | BCO, arXiv:2404.04656 |
    | sppo_hard | $(c - 1 / 2 \beta)^2 + (r + 1 / 2 \beta)^2$ | SPPO, arXiv:2405.00675 |
    | aot, aot_unpaired | the smoothed sigmoid loss of sorted differences | AOT, arXiv:2406.05882 |
    | apo_zero | $1 - \sigma(\beta c) + \sigma(\beta r)$ | APO, arXiv:2408.06266, eq. 7 |
    | apo_down | $\sigma(\beta c) + 1 - \sigma(\beta (c - r))$ | APO, eq. 8 |
    | discopop | a blend of $-\log \sigma(\beta \Delta)$ and $\exp(-\beta \Delta)$ | DiscoPOP, arXiv:2406.08414 |
    | sft | the mean negative log-likelihood of the chosen tokens | as in RPO, arXiv:2404.19733 |
    | sigmoid_norm | $-\log \sigma(\beta (u_c / n_c - u_r / n_r))$ | Tulu 3, arXiv:2411.15124 |

    Args:
        names, weights: the losses, and the coefficient of each.
        divergence, alpha: f-divergence (f-DPO, arXiv:2309.16240): reverse_kl, forward_kl, js_divergence or
            alpha_divergence, the last with parameter alpha.
        label_smoothing: epsilon in the table.
        tau: the temperature of discopop.
        weighted: multiply the losses of each pair by its `wpo_weight` (WPO, arXiv:2406.11827, eq. 2).
    """

    names: tuple[str, ...] = ("sigmoid",)
    weights: tuple[float, ...] = (1.0,)
    beta: float = 0.1
    divergence: str = "reverse_kl"
    alpha: float = 0.5
    label_smoothing: float = 0.0
    tau: float = 0.05
    weighted: bool = False

    def __call__(self, pairs: PairLogps, weight: jax.Array) -> jax.Array:
        """The total loss of the pairs, a float32 scalar.

        Args:
            weight: `[E]`, the weight of each pair in the step's loss; 0 for padding. Losses in `WHOLE_BATCH` depend on
                all pairs together and give each pair the same value.
        """
        factor, total = pairs.wpo_weight if self.weighted else 1.0, jnp.zeros(())
        for name, loss_weight in zip(self.names, self.weights, strict=True):
            together = name in WHOLE_BATCH
            losses = WHOLE_BATCH[name](self, pairs, weight > 0) if together else PER_PAIR[name](self, pairs)
            total += loss_weight * jnp.sum(weight * losses * factor)
        return total

    def scores(self, pairs: PairLogps) -> tuple[jax.Array, jax.Array]:
        """Scores of the chosen and rejected completions, `[E]` each: f' at the policy ratio (f-DPO, table 1)."""
        return tuple(map(self._score, pairs.ratios))

    def _score(self, ratio: jax.Array) -> jax.Array:
        order = self.alpha - 1
        if self.divergence == "forward_kl":
            return 1 - jnp.exp(-ratio)
        if self.divergence == "js_divergence":
            return math.log(2) + jax.nn.log_sigmoid(ratio)
        if self.divergence == "alpha_divergence" and abs(order) >= _REVERSE_KL_WITHIN:
            return (jnp.exp(jnp.minimum(order * ratio, _MAX_EXPONENT)) - 1) / order
        return ratio

    def delta_score(self, pairs: PairLogps) -> jax.Array:
        """beta times the difference of the scores, `[E]`."""
        chosen, rejected = self.scores(pairs)
        return self.beta * (chosen - rejected)

    def delta_score_per_token(self, pairs: PairLogps) -> jax.Array:
        """Difference of the scores, each divided by the completion's token count, `[E]`."""
        chosen, rejected = self.scores(pairs)
        return chosen / jnp.maximum(pairs.chosen_tokens, 1) - rejected / jnp.maximum(pairs.rejected_tokens, 1)


def length_desensitised(head: jax.Array, tail: jax.Array, alpha: float | None) -> jax.Array:
    """Log-probability of completions in LD-DPO (arXiv:2409.06411, eq. 10).

    `tail` is the sum over the tokens beyond the length of the pair's shorter completion; it is scaled by `alpha`.
    alpha=None leaves it unscaled.
    """
    return head + tail if alpha is None else head + alpha * tail


def _hinge(loss: PreferenceLoss, pairs: PairLogps) -> jax.Array:
    return jax.nn.relu(1 - loss.delta_score(pairs))


def _ipo(loss: PreferenceLoss, pairs: PairLogps) -> jax.Array:
    return jnp.square(loss.delta_score_per_token(pairs) - 1 / (2 * loss.beta))


def _exo_pair(loss: PreferenceLoss, pairs: PairLogps) -> jax.Array:
    delta_score, flipped = loss.delta_score(pairs), loss.label_smoothing
    wins = jax.nn.sigmoid(delta_score) * (jax.nn.log_sigmoid(delta_score) - math.log1p(-flipped))
    return wins + jax.nn.sigmoid(-delta_score) * (jax.nn.log_sigmoid(-delta_score) - math.log(flipped))


def _nca_pair(loss: PreferenceLoss, pairs: PairLogps) -> jax.Array:
    chosen, rejected = (loss.beta * ratio for ratio in pairs.ratios)
    both = jax.nn.log_sigmoid(-chosen) + jax.nn.log_sigmoid(-rejected)
    return -jax.nn.log_sigmoid(chosen) - 0.5 * both


def _robust(loss: PreferenceLoss, pairs: PairLogps) -> jax.Array:
    delta_score, flipped = loss.delta_score(pairs), loss.label_smoothing
    clean = (1 - flipped) * -jax.nn.log_sigmoid(delta_score) + flipped * jax.nn.log_sigmoid(-delta_score)
    return clean / (1 - 2 * flipped)


def _bco_pair(loss: PreferenceLoss, pairs: PairLogps) -> jax.Array:
    chosen, rejected = (loss.beta * ratio for ratio in pairs.ratios)
    return -jax.nn.log_sigmoid(chosen) - jax.nn.log_sigmoid(-rejected)


def _sppo_hard(loss: PreferenceLoss, pairs: PairLogps) -> jax.Array:
    (chosen, rejected), target = pairs.ratios, 0.5 / loss.beta
    return jnp.square(chosen - target) + jnp.square(rejected + target)


def _apo_zero(loss: PreferenceLoss, pairs: PairLogps) -> jax.Array:
    chosen, rejected = (jax.nn.sigmoid(loss.beta * ratio) for ratio in pairs.ratios)
    return 1 - chosen + rejected


def _apo_down(loss: PreferenceLoss, pairs: PairLogps) -> jax.Array:
    chosen, rejected = pairs.ratios
    return jax.nn.sigmoid(loss.beta * chosen) + 1 - jax.nn.sigmoid(loss.beta * (chosen - rejected))


def _discopop(loss: PreferenceLoss, pairs: PairLogps) -> jax.Array:
    delta_score = loss.delta_score(pairs)
    gate = jax.nn.sigmoid(delta_score / loss.tau)
    return -jax.nn.log_sigmoid(delta_score) * (1 - gate) + jnp.exp(-delta_score) * gate


def _aot(loss: PreferenceLoss, pairs: PairLogps, real: jax.Array) -> jax.Array:
    policy, reference = pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected
    return _sorted_loss(loss, policy, reference, real)


def _aot_unpaired(loss: PreferenceLoss, pairs: PairLogps, real: jax.Array) -> jax.Array:
    return _sorted_loss(loss, *pairs.ratios, real)


def _sorted_loss(loss: PreferenceLoss, first: jax.Array, second: jax.Array, real: jax.Array) -> jax.Array:
    """Smoothed sigmoid loss of the difference between two sorted samples. Padding sorts last and is excluded."""
    first, second = (jnp.sort(jnp.where(real, values, jnp.inf)) for values in (first, second))
    padded = jnp.arange(len(real)) >= jnp.sum(real)
    delta_score = loss.beta * jnp.where(padded, 0, jnp.where(padded, 0, first) - jnp.where(padded, 0, second))
    unflipped, flipped = jax.nn.log_sigmoid(delta_score), jax.nn.log_sigmoid(-delta_score)
    losses = -unflipped * (1 - loss.label_smoothing) - flipped * loss.label_smoothing
    # A loss over sorted samples has no per-pair value, so every pair gets the mean over the real pairs.
    return jnp.sum(jnp.where(padded, 0, losses)) / jnp.maximum(1, jnp.sum(real)) * jnp.ones(len(real))


def _sft(loss: PreferenceLoss, pairs: PairLogps, real: jax.Array) -> jax.Array:
    tokens = jnp.maximum(1, jnp.sum(jnp.where(real, pairs.chosen_targets, 0)))
    return -jnp.sum(jnp.where(real, pairs.chosen_sum, 0)) / tokens * jnp.ones(len(real))


PER_PAIR: dict[str, Callable[[PreferenceLoss, PairLogps], jax.Array]] = {
    "sigmoid": lambda loss, pairs: -jax.nn.log_sigmoid(loss.delta_score(pairs)),
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "sigmoid_norm": lambda loss, pairs: -jax.nn.log_sigmoid(loss.beta * loss.delta_score_per_token(pairs)),
}
# Losses that depend on all pairs of a micro-batch together.
WHOLE_BATCH: dict[str, Callable[[PreferenceLoss, PairLogps, jax.Array], jax.Array]] = {
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "sft": _sft,
}
