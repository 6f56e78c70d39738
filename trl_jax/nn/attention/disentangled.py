"""Disentangled attention (DeBERTa: He et al. 2021, arXiv:2006.03654): scores depend on content and on distance."""

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
    """Settings of relative distances. A table has one row per distance (or bucket), `span` rows per direction.

    Without `longest`, every distance below `span` has its own row. With it, only distances up to half of `span` do;
    from there to `longest`, buckets widen logarithmically. `key_to_query`: add products of query content and key
    distance. `query_to_key`: add products of key content and query distance. `shared`: project the table with the query
    and key maps of the content. `normed`: norm the table first. `key_bias`: the key maps have a bias.
    """

    span: int
    longest: int | None
    key_to_query: bool
    query_to_key: bool
    shared: bool = False
    normed: bool = False
    key_bias: bool = True

    def rows(self, distances: np.ndarray) -> np.ndarray:
        """The table row of each distance, query position minus key position."""
        places = distances if self.longest is None else self._bucketed(distances)
        return np.clip(places + self.span, 0, 2 * self.span - 1)

    def _bucketed(self, distances: np.ndarray) -> np.ndarray:
        """Bucket distances in float32, as the models were trained."""
        near = self.span // 2
        far = np.maximum(np.abs(distances), near).astype(np.float32)
        turns = np.log(far / np.float32(near)) / np.log(np.float32((self.longest - 1) / near))
        widened = np.ceil(turns * np.float32(near - 1)).astype(np.int64) + near
        return np.where(np.abs(distances) <= near, distances, np.sign(distances) * widened)


class DisentangledAttention(nnx.Module):
    """Scores are the sum of up to three products, divided by the square root of (their number x channels)."""

    def __init__(self, features: int, heads: int, distances: Distances):
        queries, keys = {"bias": True, "axes": ("heads", "embed")}, {"axes": ("kv", "embed")}
        to_keys, to_queries = (use and not distances.shared for use in (distances.key_to_query, distances.query_to_key))
        self.q, self.v = Linear(features, features, **queries), Linear(features, features, bias=True, **keys)
        self.o = Linear(features, features, bias=True, axes=("embed", "heads"))
        self.k = Linear(features, features, bias=distances.key_bias, **keys)
        self.distance_k = Linear(features, features, bias=distances.key_bias, **keys) if to_keys else None
        self.distance_q = Linear(features, features, **queries) if to_queries else None
        self.head_dim, self.distances = features // heads, distances

    def __call__(self, x: jax.Array, inputs: AttentionInputs, dropout: Dropout | None = None) -> jax.Array:
        """`[R, T, D]` to `[R, T, D]`, on padded rows; `inputs.scale` is not used."""
        q, k, v = (self._heads(linear(x)) for linear in (self.q, self.k, self.v))
        distances, table = self.distances, inputs.distances
        of_keys = self._heads((self.distance_k or self.k)(table)) if distances.key_to_query else None
        of_queries = self._heads((self.distance_q or self.q)(table)) if distances.query_to_key else None

        def bias(start: int, end: int) -> jax.Array:
            block = q[:, start:end]
            added = jnp.zeros((), jnp.float32)
            if of_keys is not None:
                added += _to_keys(block, of_keys, distances, start, k.shape[1])
            if of_queries is not None:
                added += _to_queries(k, of_queries, distances, start, end)
            return added[:, :, None]

        products = 1 + distances.key_to_query + distances.query_to_key
        inputs, bias = inputs._replace(scale=(self.head_dim * products) ** -0.5), bias if products > 1 else None
        out = attend_padded(q, k, v, inputs, causal=False, bias=bias, dropout=dropout)
        return self.o(out.reshape(x.shape))

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)


def _to_keys(q: jax.Array, of_keys: jax.Array, spec: Distances, start: int, length: int) -> jax.Array:
    """Products of queries from `start` on with the distance of each of `length` keys: `[R, H, T, S]`."""
    distances = start + q.shape[1] - 1 - np.arange(q.shape[1] + length - 1)
    near = of_keys[spec.rows(distances)]
    return _sheared(jnp.einsum("rthc,jhc->rhtj", q, near, preferred_element_type=jnp.float32), length)


def _to_queries(k: jax.Array, of_queries: jax.Array, spec: Distances, start: int, end: int) -> jax.Array:
    """Products of keys with the distance of each query in `[start, end)`: `[R, H, T, S]`."""
    length = k.shape[1]
    distances = start - (length - 1) + np.arange(length + end - start - 1)
    near = of_queries[spec.rows(distances)]
    products = jnp.einsum("rshc,jhc->rhsj", k, near, preferred_element_type=jnp.float32)
    return _sheared(products, end - start).swapaxes(-1, -2)


def _sheared(x: jax.Array, width: int) -> jax.Array:
    """`y[..., a, b] = x[..., a, b - a + A - 1]` for A rows of `A + width - 1`, without a gather: reshaping to rows that
    are one entry longer turns diagonals into columns."""
    *outer, rows, columns = x.shape
    flat = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)]).reshape(*outer, -1)
    return flat[..., rows - 1 : rows - 1 + rows * columns].reshape(*outer, rows, columns)[..., :width]
