"""The entropy of a policy's tokens: which of them are uncertain, and how much uncertainty is rewarded."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.losses.sums import of_all_shards


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
