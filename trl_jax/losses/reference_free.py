"""Preference losses without a reference model: ORPO's odds ratio, and CPO with SimPO and AlphaPO."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp


def log_odds(mean_logps: jax.Array) -> jax.Array:
    """Log-odds log(p / (1 - p)), where p is the geometric mean of a text's token probabilities.

    Args:
        mean_logps: float32, the mean token log-probability, below 0.
    """
    # Each form of log(1 - p) is used where it is accurate; the inner `where` keeps the other form's gradient finite.
    near_one = mean_logps > -math.log(2)
    log_complement = jnp.where(
        near_one,
        jnp.log(-jnp.expm1(jnp.where(near_one, mean_logps, -1.0))),
        jnp.log1p(-jnp.exp(jnp.where(near_one, -1.0, mean_logps))),
    )
    return mean_logps - log_complement


def odds_ratio(chosen: jax.Array, rejected: jax.Array) -> tuple[jax.Array, jax.Array]:
    r"""$\log \sigma(r)$ and $r$, the log odds ratio of chosen to rejected completions (ORPO, arXiv:2403.07691, eq. 7).

    Args:
        chosen, rejected: float32 `[E]`, the mean token log-probability of each completion.
    """
    ratio = log_odds(chosen) - log_odds(rejected)
    return jax.nn.log_sigmoid(ratio), ratio


@dataclass(frozen=True)
class ContrastiveLoss:
    r"""Contrastive preference optimization (CPO, arXiv:2401.08417), with TRL's loss names.

    With $u_c$, $u_r$ the scores of the chosen and the rejected completion and $\Delta = u_c - u_r$:

    | name | loss of a pair | from |
    | --- | --- | --- |
    | sigmoid | $-(1-\epsilon) \log \sigma(\beta \Delta) - \epsilon \log \sigma(-\beta \Delta)$ | CPO, eq. 3 |
    | simpo | the same with $\Delta - \gamma / \beta$ and mean scores | SimPO, arXiv:2405.14734, eq. 6 |
    | hinge | $\max(0, 1 - \beta \Delta)$ | SLiC, arXiv:2305.10425 |
    | ipo | $(\Delta - 1 / 2 \beta)^2$ with mean scores | IPO, arXiv:2310.12036, eq. 17 |

    A score is the completion's log-probability, summed over its tokens or, for simpo and ipo, averaged. With a nonzero
    `alpha` it is $(1 - p^{-\alpha}) / \alpha$, where p is the exponential of that (AlphaPO, arXiv:2501.03884, eq. 4).

    Args:
        label_smoothing: epsilon in the table.
        gamma: the margin of simpo.
    """

    name: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.5
    alpha: float = 0.0

    @property
    def of_mean_token(self) -> bool:
        """Whether scores use the mean over a completion's tokens instead of the sum."""
        return self.name in ("ipo", "simpo")

    def score(self, logps: jax.Array) -> jax.Array:
        """Scores of completions from their log-probabilities, `[E]`."""
        return logps if self.alpha == 0 else (1 - jnp.exp(-self.alpha * logps)) / self.alpha

    def __call__(self, chosen: jax.Array, rejected: jax.Array) -> jax.Array:
        """The loss of each pair, float32 `[E]`, from the scores of its completions, `[E]` each."""
        return LOSSES[self.name](self, chosen - rejected)

    def smoothed(self, delta: jax.Array) -> jax.Array:
        unflipped, flipped = jax.nn.log_sigmoid(self.beta * delta), jax.nn.log_sigmoid(-self.beta * delta)
        return -unflipped * (1 - self.label_smoothing) - flipped * self.label_smoothing


LOSSES: dict[str, Callable[[ContrastiveLoss, jax.Array], jax.Array]] = {
    "sigmoid": ContrastiveLoss.smoothed,
    "simpo": lambda loss, delta: loss.smoothed(delta - loss.gamma / loss.beta),
    "hinge": lambda loss, delta: jax.nn.relu(1 - loss.beta * delta),
    "ipo": lambda loss, delta: jnp.square(delta - 1 / (2 * loss.beta)),
}
