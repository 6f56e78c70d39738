"""The load-balancing loss of a mixture of experts (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.core.router_sums import RouterSums


def load_balancing_loss(sums: RouterSums) -> jax.Array:
    """E times the sum over experts of the share of tokens sent to each and its mean probability, over the tokens of all
    layers together; several experts a token count each. A float32 scalar, least where the load is even."""
    tokens = jnp.maximum(jnp.sum(sums.tokens), 1)
    selected, probabilities = jnp.sum(sums.selected, axis=0), jnp.sum(sums.probabilities, axis=0)
    return selected.shape[-1] * jnp.sum(selected / tokens * (probabilities / tokens))
