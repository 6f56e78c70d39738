"""Attention on padded rows, a text each."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from trl_jax.nn.attention import cudnn
from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.dropout import Dropout

QUERY_BLOCK = 256


def attend_padded(
    q_RTHC: jax.Array,
    k_RSKC: jax.Array,
    v_RSKC: jax.Array,
    inputs: AttentionInputs,
    *,
    causal: bool = True,
    bias: Callable[[int, int], jax.Array] | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    dropout: Dropout | None = None,
    lengths: jax.Array | None = None,
) -> jax.Array:
    """Results `[R, T, H, C]` of queries on keys and values; S = T, or all devices' tokens where they are striped.

    Queries go in blocks; where they are causal, each against the keys up to its own end: the upper triangle is never
    computed. GPUs have a kernel for causal attention without more.

    Args:
        inputs: its scale, window, valid and striped.
        causal: a query sees itself and what is before it; otherwise both sides.
        bias: from the start and end of a block of queries to `[R, K, G, T, S]`, added to its scores before they are
            scaled.
        softcap: bounds the scores before masking: `softcap * tanh(scores / softcap)`.
        sinks: float32 `[H]`, a score of each head that joins every sum of its softmax and brings no value (OpenAI 2025,
            arXiv:2508.10925).
        dropout: applied to the probabilities, as transformers' attention does.
        lengths: int32 `[R]`, behind which nobody reads the results: the GPUs' kernel leaves it out.
    """
    scale, striped = inputs.scale, inputs.striped
    plain = causal and bias is None and softcap is None and sinks is None and v_RSKC.shape == k_RSKC.shape
    plain = plain and inputs.valid is None and inputs.window is None
    if plain and dropout is None and striped is None and cudnn.attends(q_RTHC):
        return cudnn.attend_cudnn(q_RTHC, k_RSKC, v_RSKC, scale=scale, lengths=lengths)
    rows, length, heads, channels = q_RTHC.shape
    q_RTKGC = q_RTHC.reshape(rows, length, k_RSKC.shape[2], heads // k_RSKC.shape[2], channels)
    sinks_KG11 = None if sinks is None else sinks.reshape(*q_RTKGC.shape[2:4], 1, 1)
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        places_T = jnp.arange(start, end) if striped is None else striped.places(start, end)
        last = end * (1 if striped is None else striped.devices) if causal else k_RSKC.shape[1]
        mask = _mask(places_T, last, causal, inputs._replace(window=_window(inputs, start, end)))
        block_dropout, block_bias = dropout and dropout.fold(start), bias and bias(start, end)
        qkv = q_RTKGC[:, start:end], k_RSKC[:, :last], v_RSKC[:, :last]
        blocks.append(_softmax_average(*qkv, mask, scale, block_bias, softcap, sinks_KG11, block_dropout))
    return jnp.concatenate(blocks, axis=1).reshape(rows, length, heads, -1)


def _window(inputs: AttentionInputs, start: int, end: int) -> jax.Array | None:
    """That of these queries, broadcasting to `[R, K, G, T, S]`."""
    window = inputs.window
    return window if window is None or window.ndim == 0 else window[:, None, None, start:end, None]


def _mask(places_T: jax.Array, last: int, causal: bool, inputs: AttentionInputs) -> jax.Array:
    """Which of the keys `[0, last)` the queries at these places see: bool, broadcasting to `[R, K, G, T, S]`."""
    distance_TS = places_T[:, None] - jnp.arange(last)
    mask = distance_TS >= 0 if causal else jnp.ones_like(distance_TS, bool)
    if inputs.window is not None:
        mask = mask & (jnp.abs(distance_TS) < inputs.window)
    if inputs.valid is not None:
        valid = inputs.valid[:, None, None, None, :last]
        # A pad sees itself, so that no softmax is empty; where both sides are seen, any token of the text will do.
        mask = mask & (valid | (distance_TS == 0) if causal else valid)
    return mask


def _softmax_average(q_RTKGC, k_RSKC, v_RSKC, mask, scale, bias, softcap, sinks_KG11, dropout):
    scores = jnp.einsum("rtkgc,rskc->rkgts", q_RTKGC, k_RSKC, preferred_element_type=jnp.float32)
    scores = (scores if bias is None else scores + bias) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights_RKGTS = _softmax(scores, sinks_KG11).astype(v_RSKC.dtype)
    if dropout is not None:
        weights_RKGTS = dropout(weights_RKGTS)
    return jnp.einsum("rkgts,rskc->rtkgc", weights_RKGTS, v_RSKC)


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Probabilities over the last axis; with the sinks, broadcast to one score, they add up to less than 1."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    log_sum = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    return jnp.exp(scores - jnp.logaddexp(log_sum, sinks.astype(scores.dtype)))
