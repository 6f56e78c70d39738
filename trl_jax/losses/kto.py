"""Losses of answers that are each desirable or not, on the log-probabilities of a policy and a reference."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from trl_jax.losses.supervised import mean_over_shards


@dataclass(frozen=True)
class UnpairedLoss:
    r"""The loss that `name` names, by TRL's name.

    With $r$ the logarithm of policy / reference of an answer, and $z$ the estimate of `kl_estimate`:

    | name | loss of a desirable answer | of an undesirable one | from |
    | --- | --- | --- | --- |
    | kto | $1 - \sigma(\beta (r - z))$ | $1 - \sigma(\beta (z - r))$ | KTO, arXiv:2402.01306, eq. 7 |
    | apo_zero_unpaired | $1 - \sigma(\beta r)$ | $\sigma(\beta r)$ | APO, arXiv:2408.06266, eq. 7, without pairs |

    Args:
        desirable_weight, undesirable_weight: the factor of the losses of either kind.
    """

    name: str = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    @property
    def estimates_kl(self) -> bool:
        """Whether the loss is compared with `kl_estimate`."""
        return self.name == "kto"

    def __call__(self, ratio: jax.Array, desirable: jax.Array, kl: jax.Array, weight: jax.Array) -> jax.Array:
        """The loss of the answers, a float32 scalar.

        Args:
            ratio: `[E]`, the logarithm of policy / reference of each answer.
            desirable: bool `[E]`.
            kl: a scalar; 0 where the loss knows none.
            weight: `[E]` share of each answer in the step's loss; 0 marks one that only fills the shape.
        """
        ahead = jnp.where(desirable, ratio - kl, kl - ratio)
        factor = jnp.where(desirable, self.desirable_weight, self.undesirable_weight)
        return jnp.sum(weight * factor * (1 - jax.nn.sigmoid(self.beta * ahead)))


def kl_estimate(ratio: jax.Array, real: jax.Array) -> jax.Array:
    """The estimate of the divergence between policy and reference, no less than 0: the mean log-ratio of answers to
    other prompts (KTO, section 4.1). No gradient goes through it.

    Args:
        ratio: `[E]`, the logarithm of policy / reference of each answer.
        real: bool `[E]`, which of them count. On several devices the mean is over those of all.
    """
    total, count = jnp.sum(jnp.where(real, ratio, 0)), jnp.sum(real, dtype=jnp.float32)
    total, count = mean_over_shards(total), mean_over_shards(count)
    return jax.lax.stop_gradient(jax.nn.relu(total / jnp.where(count > 0, count, 1)))
