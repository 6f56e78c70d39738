"""KTO losses: completions labeled desirable or undesirable, with a policy and a reference."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from trl_jax.losses.supervised import mean_over_shards


@dataclass(frozen=True)
class UnpairedLoss:
    r"""The unpaired loss called `name`, as in TRL.

    With $r$ = log(policy / reference) of a completion and $z$ the KL estimate of `kl_estimate`:

    | name | loss of a desirable completion | loss of an undesirable one | from |
    | --- | --- | --- | --- |
    | kto | $1 - \sigma(\beta (r - z))$ | $1 - \sigma(\beta (z - r))$ | KTO, arXiv:2402.01306, eq. 7 |
    | apo_zero_unpaired | $1 - \sigma(\beta r)$ | $\sigma(\beta r)$ | APO, arXiv:2408.06266, eq. 7, without pairs |

    Args:
        desirable_weight, undesirable_weight: loss coefficient of each kind.
    """

    name: str = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    @property
    def estimates_kl(self) -> bool:
        """Whether the loss uses `kl_estimate`."""
        return self.name == "kto"

    def __call__(self, ratio: jax.Array, desirable: jax.Array, kl: jax.Array, weight: jax.Array) -> jax.Array:
        """The total loss of the completions, a float32 scalar.

        Args:
            ratio: `[E]`, log(policy / reference) of each completion.
            desirable: bool `[E]`.
            kl: a scalar; 0 for a loss that does not use it.
            weight: `[E]`, the weight of each completion in the step's loss; 0 for padding.
        """
        ahead = jnp.where(desirable, ratio - kl, kl - ratio)
        factor = jnp.where(desirable, self.desirable_weight, self.undesirable_weight)
        return jnp.sum(weight * factor * (1 - jax.nn.sigmoid(self.beta * ahead)))


def kl_estimate(ratio: jax.Array, real: jax.Array) -> jax.Array:
    """Estimate of KL(policy || reference), at least 0: the mean log-ratio over mismatched prompt-completion pairs (KTO,
    section 4.1). No gradient flows through it.

    Args:
        ratio: `[E]`, log(policy / reference) of each completion.
        real: bool `[E]`, False for padding. The mean is over all devices.
    """
    total, count = jnp.sum(jnp.where(real, ratio, 0)), jnp.sum(real, dtype=jnp.float32)
    total, count = mean_over_shards(total), mean_over_shards(count)
    return jax.lax.stop_gradient(jax.nn.relu(total / jnp.where(count > 0, count, 1)))
