"""SparseMixer: experts that are drawn, with a gradient for the choice (Liu et al. 2024, arXiv:2409.12136)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

_FIRST, _SECOND, _INPUT, _INPUT_AGAIN = range(4)  # places of draws
_ALWAYS_WHOLE = 0.75  # the weight of an expert that was not the likeliest stays whole where a larger number is drawn
_SCALED_DOWN = 0.3333


@dataclass(frozen=True)
class SparseMixer:
    """Selects two experts a token, one after the other, each from candidates whose scores come close to the best.

    jitter: a candidate's score is less than the best by no more than 2 * jitter of the larger of the best and its own
        magnitude. An expert's weight is its probability among the candidates, so the best one's is 1 where it is alone.
    input_jitter: how far the factors are from 1 that training multiplies the experts' input by.
    """

    jitter: float
    input_jitter: float

    def __call__(self, scores: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Weights and experts `[tokens, 2]` of scores `[tokens, E]`: the best candidates or, with a random `key`, some
        drawn by their probabilities, as in training."""
        first_weight, first = self._one(scores, scores, _folded(key, _FIRST))
        left = jnp.where(jnp.arange(scores.shape[-1]) == first, -jnp.inf, scores)
        second_weight, second = self._one(scores, left, _folded(key, _SECOND))
        return jnp.concatenate([first_weight, second_weight], -1), jnp.concatenate([first, second], -1)

    def jittered(self, x: jax.Array, key: jax.Array) -> jax.Array:
        """The input of experts and their router as training has it: each number times two factors that the `key`
        draws evenly."""
        if self.input_jitter == 0.0:
            return x
        low, high = 1.0 - self.input_jitter, 1.0 + self.input_jitter
        one, other = (
            jax.random.uniform(_folded(key, place), x.shape, jnp.float32, low, high) for place in (_INPUT, _INPUT_AGAIN)
        )
        return (x * one * other).astype(x.dtype)

    def _one(self, scores: jax.Array, left: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """The weight and the number of one expert, `[tokens, 1]`; those that are no longer `left` have -inf there."""
        best = jnp.max(left, axis=-1, keepdims=True)
        far = (best - scores) / jnp.maximum(jnp.abs(scores), best) > 2 * self.jitter
        candidates = jnp.where(far, -jnp.inf, left)
        likeliest = jnp.argmax(candidates, axis=-1, keepdims=True)
        drawn = likeliest if key is None else _drawn(candidates, key)
        weight = jnp.take_along_axis(jax.nn.softmax(candidates, axis=-1), drawn, axis=-1)
        return weight if key is None else _scaled(weight, drawn == likeliest, key), drawn


def _drawn(candidates: jax.Array, key: jax.Array) -> jax.Array:
    """One candidate a token by the softmax of their scores: the largest with Gumbel noise."""
    noise = jax.random.gumbel(jax.random.fold_in(key, 0), candidates.shape, jnp.float32)
    return jnp.argmax(candidates + noise, axis=-1, keepdims=True)


def _scaled(weight: jax.Array, likeliest: jax.Array, key: jax.Array) -> jax.Array:
    """The weight of a drawn expert, with the gradient that it has unscaled: where some are scaled down, these add up to
    Heun's third-order estimate of the gradient for the choice (Liu et al. 2023, arXiv:2310.00811)."""
    whole = likeliest | (jax.random.uniform(jax.random.fold_in(key, 1), weight.shape) > _ALWAYS_WHOLE)
    value = weight * jnp.where(whole, 1.0, _SCALED_DOWN)
    return jax.lax.stop_gradient(value) + (weight - jax.lax.stop_gradient(weight))


def _folded(key: jax.Array | None, place: int) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, place)
