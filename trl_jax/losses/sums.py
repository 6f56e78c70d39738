"""Sums over the examples of a batch, or of each of its micro-batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.core.layer_gather import SEQUENCE


def real_examples(weight: jax.Array, micro_batch: jax.Array | None = None) -> jax.Array:
    """Which examples count: bool `[E]`, those with a weight; with `micro_batch` bool `[M, E]`, those of each."""
    return weight > 0 if micro_batch is None else micro_batch & (weight > 0)


def summed(values: jax.Array | float, examples: jax.Array) -> jax.Array:
    """The sum of `[E]` values over the examples that are real, float32: a scalar, or `[M]`."""
    return jnp.sum(jnp.where(examples, values, 0), axis=-1, dtype=jnp.float32)


def of_texts(values: jax.Array, text: jax.Array, texts: int) -> jax.Array:
    """The sum over the reads of each text, float32 `[texts]`.

    Args:
        values: `[N]`, of each read.
        text: int32 `[N]`, the text of each; `texts` where it belongs to none.
    """
    return jnp.zeros(texts, jnp.float32).at[text].add(values.astype(jnp.float32), mode="drop")


def at_reads(values: jax.Array, text: jax.Array) -> jax.Array:
    """For each read `[N]` the value of its text; 0 of one that belongs to none.

    Args:
        values: `[X]`, of each text; of each example, where an example is one text.
        text: int32 `[N]`, the text of each read; X where it belongs to none.
    """
    return jnp.asarray(values).at[text].get(mode="fill", fill_value=0)


def mean_over_shards(value: jax.Array) -> jax.Array:
    """The mean of a value over the devices that each have a share of the batch, on all of them; without several
    devices the value itself. Shares weigh the same, as ranks do in accelerate's `gather(...).mean()`."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return jax.lax.pmean(value, axes) if axes else value


def of_all_shards(values: jax.Array) -> jax.Array:
    """The `[N]` values of each device that has a share of the batch, end to end; without several devices as they are.
    Along the sequence axis devices have the same ones, which count once."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    shared = tuple(axis for axis in axes if axis != SEQUENCE)
    return jax.lax.all_gather(values, shared, tiled=True) if shared else values
