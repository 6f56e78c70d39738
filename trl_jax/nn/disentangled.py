"""Attention with a part for the contents of two tokens and parts for how far apart they are.

He et al. 2021, arXiv:2006.03654.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trl_jax.nn.attention import attend
from trl_jax.nn.dropout import Dropout
from trl_jax.nn.linear import Linear


@dataclass(frozen=True)
class Distances:
    """What is known of the distance from a query to a key: a row of a table, `span` rows for either direction.

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
        self.q, self.v, self.o = (Linear(features, features, bias=True) for _ in range(3))
        self.k = Linear(features, features, bias=distances.key_bias)
        own = not distances.shared
        self.distance_k = (
            Linear(features, features, bias=distances.key_bias) if own and distances.key_to_query else None
        )
        self.distance_q = Linear(features, features, bias=True) if own and distances.query_to_key else None
        self.head_dim, self.distances = features // heads, distances

    def __call__(
        self, x: jax.Array, *, table: jax.Array, valid: jax.Array, dropout: Dropout | None = None
    ) -> jax.Array:
        """`[R, T, D]` to the same; `table` `[2 * span, D]`, `valid` and `dropout` as `attend` takes them."""
        q, k, v = (self._heads(part(x)) for part in (self.q, self.k, self.v))
        known = self.distances
        of_keys = self._heads((self.distance_k or self.k)(table)) if known.key_to_query else None
        of_queries = self._heads((self.distance_q or self.q)(table)) if known.query_to_key else None

        def bias(start: int, end: int) -> jax.Array:
            block = q[:, start:end]
            added = jnp.zeros((), jnp.float32)
            if of_keys is not None:
                added += _to_keys(block, of_keys, known, start, k.shape[1])
            if of_queries is not None:
                added += _to_queries(k, of_queries, known, start, end)
            return added[:, :, None]

        products = 1 + known.key_to_query + known.query_to_key
        scale = (self.head_dim * products) ** -0.5
        out = attend(
            q, k, v, scale=scale, causal=False, bias=bias if products > 1 else None, valid=valid, dropout=dropout
        )
        return self.o(out.reshape(x.shape))

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)


def _to_keys(q: jax.Array, of_keys: jax.Array, known: Distances, start: int, length: int) -> jax.Array:
    """Queries from `start` on against the distance of each of `length` keys: `[R, H, T, S]`."""
    distances = start + q.shape[1] - 1 - np.arange(q.shape[1] + length - 1)
    near = of_keys[known.rows(distances)]
    return _sheared(jnp.einsum("rthc,jhc->rhtj", q, near, preferred_element_type=jnp.float32), length)


def _to_queries(k: jax.Array, of_queries: jax.Array, known: Distances, start: int, end: int) -> jax.Array:
    """Keys against the distance of each of the queries `[start, end)`: `[R, H, T, S]`."""
    length = k.shape[1]
    distances = start - (length - 1) + np.arange(length + end - start - 1)
    near = of_queries[known.rows(distances)]
    products = jnp.einsum("rshc,jhc->rhsj", k, near, preferred_element_type=jnp.float32)
    return _sheared(products, end - start).swapaxes(-1, -2)


def _sheared(x: jax.Array, width: int) -> jax.Array:
    """`y[..., a, b] = x[..., a, b - a + A - 1]` for A rows of `A + width - 1`, without a gather: a diagonal is a
    column of rows that are one entry longer."""
    *outer, rows, columns = x.shape
    flat = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)]).reshape(*outer, -1)
    return flat[..., rows - 1 : rows - 1 + rows * columns].reshape(*outer, rows, columns)[..., :width]
