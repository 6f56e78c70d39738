"""Attention: the one place that knows how tokens of a layout may see each other."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.nn.linear import Linear
from trl_jax.nn.norm import RMSNorm
from trl_jax.nn.rope import rotate

QUERY_BLOCK = 256


class Dropout(NamedTuple):
    """Attention dropout: `rate` of the probabilities is zeroed with the random `key`."""

    rate: float
    key: jax.Array


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    valid: jax.Array | None = None,
    window: jax.Array | None = None,
    dropout: Dropout | None = None,
) -> jax.Array:
    """Causal attention on padded rows, queries `[R, T, H, C]` on keys and values `[R, T, K, C]`.

    Queries go in blocks, each against the keys up to its own end: the upper triangle is never computed.

    Args:
        scale: multiplies the scores before the softmax, which is taken in float32.
        valid: `[R, T]` bool, keys that may be seen; None where every pad stands to the right of the text.
        window: int32 scalar; a query at t sees keys s with t - s < window. None sees everything before.
        dropout: applied to the probabilities, as transformers' attention does.
    """
    rows, length, heads, channels = q.shape
    grouped = q.reshape(rows, length, k.shape[2], heads // k.shape[2], channels)
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        seen = _visible(start, end, valid, window)
        block_dropout = dropout and dropout._replace(key=jax.random.fold_in(dropout.key, start))
        blocks.append(_softmax_average(grouped[:, start:end], k[:, :end], v[:, :end], seen, scale, block_dropout))
    return jnp.concatenate(blocks, axis=1).reshape(q.shape)


def _visible(start: int, end: int, valid: jax.Array | None, window: jax.Array | None) -> jax.Array:
    """Which of the keys `[0, end)` the queries `[start, end)` see: bool, broadcasting to `[R, K, G, T, S]`."""
    distance = jnp.arange(start, end)[:, None] - jnp.arange(end)
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    if valid is not None:
        seen = seen & (valid[:, None, None, None, :end] | (distance == 0))  # a pad sees itself: no empty softmax
    return seen


def _softmax_average(q, k, v, seen, scale, dropout):
    scores = jnp.einsum("rtkgc,rskc->rkgts", q, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    if dropout is not None:
        kept = jax.random.bernoulli(dropout.key, 1 - dropout.rate, weights.shape)
        weights = jnp.where(kept, weights / (1 - dropout.rate), 0)
    return jnp.einsum("rkgts,rskc->rtkgc", weights, v)


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions; optional biases and norm of each head's q and k."""

    def __init__(self, arch):
        size_q, size_k = arch.num_heads * arch.head_dim, arch.num_key_heads * arch.head_dim
        self.q = Linear(arch.hidden_size, size_q, bias=arch.qkv_bias)
        self.k = Linear(arch.hidden_size, size_k, bias=arch.qkv_bias)
        self.v = Linear(arch.hidden_size, size_k, bias=arch.qkv_bias)
        self.o = Linear(size_q, arch.hidden_size, bias=arch.o_bias)
        self.q_norm = RMSNorm(arch.head_dim, eps=arch.norm_eps) if arch.qk_norm else None
        self.k_norm = RMSNorm(arch.head_dim, eps=arch.norm_eps) if arch.qk_norm else None
        self.head_dim = arch.head_dim

    def __call__(self, x, *, cos, sin, valid=None, window=None, dropout=None):
        q_RTHC, k_RTKC, v_RTKC = (self._heads(project(x)) for project in (self.q, self.k, self.v))
        if self.q_norm is not None:
            q_RTHC, k_RTKC = self.q_norm(q_RTHC), self.k_norm(k_RTKC)
        q_RTHC, k_RTKC = rotate(q_RTHC, cos, sin), rotate(k_RTKC, cos, sin)
        mixed_RTHC = attend(
            q_RTHC, k_RTKC, v_RTKC, scale=self.head_dim**-0.5, valid=valid, window=window, dropout=dropout
        )
        return self.o(mixed_RTHC.reshape(*x.shape[:-1], -1))

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)
