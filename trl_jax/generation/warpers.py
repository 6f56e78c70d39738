"""Changes of the scores that sampling alone takes, as transformers' warpers compute them.

Each is a pytree of traced numbers and a function of (history, float32 scores `[R, V]`); a removed id has -inf. At least
one id of each row stays.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trl_jax.generation.history import History, Number
from trl_jax.generation.selection import among_largest, leading, until

_TOP_H_IDS = 100  # the most that TopH looks at, as in transformers


def keep(kept_RV: jax.Array, scores_RV: jax.Array) -> jax.Array:
    """The scores with -inf for whatever is not kept."""
    return jnp.where(kept_RV, scores_RV, -jnp.inf)


def is_first_largest(scores_RV: jax.Array) -> jax.Array:
    """Where the first of the largest scores of each row stands: bool `[R, V]`."""
    return jnp.arange(scores_RV.shape[-1]) == jnp.argmax(scores_RV, axis=-1, keepdims=True)


def entropy(scores_RV: jax.Array) -> jax.Array:
    """In nats, `[R, 1]`."""
    logp_RV = jax.nn.log_softmax(scores_RV, axis=-1)
    p_RV = jnp.exp(logp_RV)
    return -jnp.where(p_RV > 0, p_RV * logp_RV, 0).sum(axis=-1, keepdims=True)


class Temperature(NamedTuple):
    """Divides by a temperature."""

    temperature: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        return scores_RV / self.temperature


class TopH(NamedTuple):
    """Keeps the likeliest ids, of the first 100, while their terms of the entropy add up to at most `top_h` of it
    (Potraghloo et al. 2025, arXiv:2509.02510)."""

    top_h: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        first_RV = leading(-scores_RV, jnp.ones_like(scores_RV), _TOP_H_IDS)
        top_RV = keep(first_RV, scores_RV)
        p_RV = jax.nn.softmax(top_RV, axis=-1)
        terms_RV = jnp.where(p_RV > 0, -p_RV * jnp.log(p_RV), 0)
        within_RV = leading(-top_RV, terms_RV, entropy(top_RV) * self.top_h) & (p_RV > 0)
        return keep(within_RV | is_first_largest(scores_RV), scores_RV)


class TopK(NamedTuple):
    """Keeps the `top_k` largest scores and what equals the last of them (Fan et al. 2018, arXiv:1805.04833)."""

    top_k: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        return keep(among_largest(scores_RV, self.top_k), scores_RV)


class TopP(NamedTuple):
    """Removes the least likely ids that add up to at most `tail` = 1 - top_p (Holtzman et al. 2019, arXiv:1904.09751).

    Of equals, those further on stay.
    """

    tail: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        removed_RV = leading(scores_RV, jax.nn.softmax(scores_RV, axis=-1), self.tail)

        def but_for_the_last():
            places, largest_R1 = jnp.arange(scores_RV.shape[-1]), scores_RV.max(axis=-1, keepdims=True)
            last_R1 = jnp.where(scores_RV >= largest_R1, places, -1).max(axis=-1, keepdims=True)
            return removed_RV & (places != last_R1)

        return keep(~jax.lax.cond(self.tail > 0.99, but_for_the_last, lambda: removed_RV), scores_RV)


class MinP(NamedTuple):
    """Keeps ids that are at least `min_p` times as likely as the likeliest (Nguyen et al. 2024, arXiv:2407.01082)."""

    min_p: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        p_RV = jax.nn.softmax(scores_RV, axis=-1)
        return keep(p_RV >= self.min_p * p_RV.max(axis=-1, keepdims=True), scores_RV)


class TypicalP(NamedTuple):
    """Keeps ids whose surprise is nearest to the entropy, until they add up to `typical_p` (Meister et al. 2022,
    arXiv:2202.00666)."""

    typical_p: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        logp_RV = jax.nn.log_softmax(scores_RV, axis=-1)
        distance_RV = jnp.abs(-logp_RV - entropy(scores_RV))
        return keep(until(distance_RV, jax.nn.softmax(scores_RV, axis=-1), self.typical_p), scores_RV)


class EpsilonCutoff(NamedTuple):
    """Removes ids less likely than `epsilon`, but not the likeliest (Hewitt et al. 2022, arXiv:2210.15191)."""

    epsilon: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        return _cut(scores_RV, self.epsilon)


class EtaCutoff(NamedTuple):
    """Removes ids less likely than min(epsilon, sqrt(epsilon) exp(-entropy)), but not the likeliest (Hewitt et al.
    2022, arXiv:2210.15191)."""

    epsilon: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        return _cut(scores_RV, jnp.minimum(self.epsilon, jnp.sqrt(self.epsilon) * jnp.exp(-entropy(scores_RV))))


def _cut(scores_RV: jax.Array, least: jax.Array) -> jax.Array:
    likely_RV = jax.nn.softmax(scores_RV, axis=-1) >= least
    return keep(likely_RV | (scores_RV >= scores_RV.max(axis=-1, keepdims=True)), scores_RV)


class Renormalize(NamedTuple):
    """Makes log-probabilities of the scores, after all else."""

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(scores_RV, axis=-1)
