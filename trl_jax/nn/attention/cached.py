"""Attention of tokens that follow those in a cache; M = (completions of a prompt) x (query heads a key head)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trl_jax.nn.attention.inputs import AttentionInputs
from trl_jax.nn.cache.places import of_prompts


def attend_cached(
    q_RTHC: jax.Array,
    k_RTKC: jax.Array,
    v_RTKC: jax.Array,
    inputs: AttentionInputs,
    *,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Results `[R, 1, H, C]` of one query a row on the cache, `inputs.cache`, and on its own key and value.

    Of `inputs` it takes scale, window, cache and places; `sinks` as in `attend_padded`. One softmax is taken over three
    parts, the shared prompt, the completion and the token itself, joined by their maximum and sum (Milakov and
    Gimelshein 2018, arXiv:1805.02867).
    """
    cache, lengths_P, own_P = inputs.cache, inputs.places.prompt_lengths, inputs.places.own
    prompts, heads, places, channels = cache.prompt_k.shape
    group, capacity = cache.v.shape[1], cache.v.shape[3]
    q_PGKMC = q_RTHC.reshape(prompts, group, heads, -1, channels)
    own_k, own_v = (y.reshape(prompts, group, heads, 1, -1) for y in (k_RTKC, v_RTKC))
    position_P = lengths_P + own_P
    back_T, at_PS = inputs.places.tokens_back(capacity), of_prompts(lengths_P, places)
    seen_PS = at_PS < lengths_P[:, None]
    seen_PT = back_T <= own_P[:, None]
    if inputs.window is not None:
        window = inputs.window.reshape(prompts, -1)[:, :1] if inputs.window.ndim else inputs.window
        seen_PS &= position_P[:, None] - at_PS < window
        seen_PT &= back_T < window
    q_PKMC = q_PGKMC.swapaxes(1, 2).reshape(prompts, heads, -1, channels)  # the queries of a prompt's completions
    of_prompt = _dot("pkmc,pksc->pkms", q_PKMC, cache.prompt_k).reshape(prompts, heads, group, -1, places)
    of_own = _dot("pgkmc,pgkct->pgkmt", q_PGKMC, cache.k_T)
    scores = [
        _masked(_bounded(of_prompt.swapaxes(1, 2), inputs.scale, softcap), seen_PS[:, None, None, None]),
        _masked(_bounded(of_own, inputs.scale, softcap), seen_PT[:, None, None, None]),
        _bounded(_dot("pgkmc,pgktc->pgkmt", q_PGKMC, own_k), inputs.scale, softcap),
    ]
    sinks_KM1 = None if sinks is None else sinks.astype(jnp.float32).reshape(heads, -1, 1)
    weights = _softmax(scores, sinks_KM1, v_RTKC.dtype)
    by_prompt = weights[0].swapaxes(1, 2).reshape(prompts, heads, -1, places)
    out_prompt = _dot("pkms,pksc->pkmc", by_prompt, cache.prompt_v)
    out_prompt = out_prompt.reshape(prompts, heads, group, -1, own_v.shape[-1])
    out = out_prompt.swapaxes(1, 2) + _dot("pgkmt,pgktc->pgkmc", weights[1], cache.v) + weights[2] * own_v
    return out.astype(v_RTKC.dtype).reshape(*q_RTHC.shape[:-1], -1)


def _dot(form: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(form, left, right, preferred_element_type=jnp.float32)


def _bounded(scores: jax.Array, scale: float | jax.Array, softcap: float | None) -> jax.Array:
    scores = scores * scale
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def _masked(scores: jax.Array, seen: jax.Array) -> jax.Array:
    return jnp.where(seen, scores, -jnp.inf)


def _softmax(parts: list[jax.Array], sinks: jax.Array | None, dtype: jnp.dtype) -> list[jax.Array]:
    """Probabilities over the last axes of all parts together, rounded to `dtype`. The last part is never masked."""
    highest = parts[-1] if sinks is None else jnp.maximum(parts[-1], sinks)
    for part in parts[:-1]:
        highest = jnp.maximum(highest, jnp.max(part, axis=-1, keepdims=True))
    weights = [jnp.exp(part - highest) for part in parts]
    total = sum(jnp.sum(part, axis=-1, keepdims=True) for part in weights)
    if sinks is not None:
        total += jnp.exp(sinks - highest)
    return [(part / total).astype(dtype) for part in weights]
