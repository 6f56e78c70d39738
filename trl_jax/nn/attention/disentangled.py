"""Attention with a part for the contents of two tokens and parts for how far apart they are.

He et al. 2021, arXiv:2006.03654.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trl_jax.nn.attention.attention import attend_padded
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.linear import Dropout, Linear


@dataclass(frozen=True)
class Distances:
    """The facts of distances from a query to a key: each has a row of a table, `span` rows for either direction.

    Without `longest` every distance below `span` has a row of its own. With it, only those up to half of `span` have;
    from there to `longest` rows widen logarithmically. `key_to_query`: a query's content meets the key's distance;
    `query_to_key`: a key's content meets the query's. `shared`: the table goes through the maps of queries and keys
    themselves. `normed`: it is normed before. `key_bias`: the maps that make keys have a bias.
    """

    span: int
    longest: int | None
    key_to_query: bool
    query_to_key: bool
    shared: bool = False
    normed: bool = False
    key_bias: bool = True

    def rows(self, distances: np.ndarray) -> np.ndarray:
        """The row of each distance, query's position less key's."""
        places = distances if self.longest is None else self._bucketed(distances)
        return np.clip(places + self.span, 0, 2 * self.span - 1)

    def _bucketed(self, distances: np.ndarray) -> np.ndarray:
        """In float32, as the table was trained."""
        near = self.span // 2
        far = np.maximum(np.abs(distances), near).astype(np.float32)
        turns = np.log(far / np.float32(near)) / np.log(np.float32((self.longest - 1) / near))
        widened = np.ceil(turns * np.float32(near - 1)).astype(np.int64) + near
        return np.where(np.abs(distances) <= near, distances, np.sign(distances) * widened)


class DisentangledAttention(nnx.Module):
    """Scores are the sum of up to three products, scaled by the root of their number and of the channels."""

    def __init__(self, features: int, heads: int, distances: Distances):
        queries, keys = {"bias": True, "axes": ("heads", "embed")}, {"axes": ("kv", "embed")}
        to_keys, to_queries = (one and not distances.shared for one in (distances.key_to_query, distances.query_to_key))
        self.q, self.v = Linear(features, features, **queries), Linear(features, features, bias=True, **keys)
        self.o = Linear(features, features, bias=True, axes=("embed", "heads"))
        self.k = Linear(features, features, bias=distances.key_bias, **keys)
        self.distance_k = Linear(features, features, bias=distances.key_bias, **keys) if to_keys else None
        self.distance_q = Linear(features, features, **queries) if to_queries else None
        self.head_dim, self.distances = features // heads, distances

    def __call__(self, x: jax.Array, inputs: AttentionInputs, dropout: Dropout | None = None) -> jax.Array:
        """`[R, T, D]` to the same, on padded rows; the scale is its own."""
        q, k, v = (self._heads(linear(x)) for linear in (self.q, self.k, self.v))
        facts, table = self.distances, inputs.distances
        of_keys = self._heads((self.distance_k or self.k)(table)) if facts.key_to_query else None
        of_queries = self._heads((self.distance_q or self.q)(table)) if facts.query_to_key else None

        def bias(start: int, end: int) -> jax.Array:
            block = q[:, start:end]
            added = jnp.zeros((), jnp.float32)
            if of_keys is not None:
                added += _to_keys(block, of_keys, facts, start, k.shape[1])
            if of_queries is not None:
                added += _to_queries(k, of_queries, facts, start, end)
            return added[:, :, None]

        products = 1 + facts.key_to_query + facts.query_to_key
        inputs, bias = inputs._replace(scale=(self.head_dim * products) ** -0.5), bias if products > 1 else None
        out = attend_padded(q, k, v, inputs, causal=False, bias=bias, dropout=dropout)
        return self.o(out.reshape(x.shape))

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)


def _to_keys(q: jax.Array, of_keys: jax.Array, facts: Distances, start: int, length: int) -> jax.Array:
    """Queries from `start` on against the distance of each of `length` keys: `[R, H, T, S]`."""
    distances = start + q.shape[1] - 1 - np.arange(q.shape[1] + length - 1)
    near = of_keys[facts.rows(distances)]
    return _sheared(jnp.einsum("rthc,jhc->rhtj", q, near, preferred_element_type=jnp.float32), length)


def _to_queries(k: jax.Array, of_queries: jax.Array, facts: Distances, start: int, end: int) -> jax.Array:
    """Keys against the distance of each of the queries `[start, end)`: `[R, H, T, S]`."""
    length = k.shape[1]
    distances = start - (length - 1) + np.arange(length + end - start - 1)
    near = of_queries[facts.rows(distances)]
    products = jnp.einsum("rshc,jhc->rhsj", k, near, preferred_element_type=jnp.float32)
    return _sheared(products, end - start).swapaxes(-1, -2)


def _sheared(x: jax.Array, width: int) -> jax.Array:
    """`y[..., a, b] = x[..., a, b - a + A - 1]` for A rows of `A + width - 1`, without a gather: a diagonal is a
    column of rows that are one entry longer."""
    *outer, rows, columns = x.shape
    flat = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)]).reshape(*outer, -1)
    return flat[..., rows - 1 : rows - 1 + rows * columns].reshape(*outer, rows, columns)[..., :width]
