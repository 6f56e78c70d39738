"""The tokens that a policy's loss reads, and sums over completions and micro-batches."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trl_jax.losses.sums import of_texts, summed


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
