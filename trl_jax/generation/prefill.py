"""Prompts through the model once: the logits behind each, and the keys and values that completions will see."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.core.packed import reads_of_rows
from trl_jax.generation.decode import Decoding
from trl_jax.generation.shards import Shards, on_each
from trl_jax.generation.weights import by_layers, trunk_of
from trl_jax.models.arch.cache_parts import cache_parts
from trl_jax.models.cached_decoder import with_keys
from trl_jax.models.functional import merge
from trl_jax.nn.cache.cache import Cache, Kept
from trl_jax.nn.cache.places import CachePlaces, Room


@partial(
    jax.jit, static_argnames=("graph", "group", "capacity", "max_tokens", "dtype", "head_dtype", "by_layer", "shards")
)
def prefill(
    graph: Any,
    arrays: dict[str, jax.Array],
    tokens: jax.Array,
    lengths: jax.Array,
    longest: jax.Array,
    *,
    group: int,
    capacity: int,
    max_tokens: int,
    dtype: jnp.dtype,
    by_layer: bool,
    head_dtype: jnp.dtype | None = None,
    shards: Shards | None = None,
) -> tuple[jax.Array, Cache]:
    """Logits `[P, V]`, float32, of the token after each prompt, and the cache for `group` completions of each.

    Args:
        tokens: int32 `[P, S]`, prompts from place 0 on; anything behind them.
        lengths: int32 `[P]`, of the prompts, at least 1 each. longest: int32 scalar, of the longest text of the call.
        capacity: places of the cache for each completion.
        max_tokens: no prompt with its completion will have more; windows as long are left out.
        by_layer: the cache has a part for each layer, not for several (models/arch/cache_parts.py).
        head_dtype: what the head computes in; None: `dtype`.
    """
    head_dtype = dtype if head_dtype is None else head_dtype

    def of_shard(arrays, tokens, lengths, longest):
        model = merge(graph, arrays)
        trunk = trunk_of(model)
        hidden, kept = _through(trunk, tokens, lengths, longest, dtype, max_tokens)
        logits = model.outputs(hidden.astype(dtype), None, head_dtype, None, 1.0).astype(jnp.float32)
        parts = [own.cache(lengths, room) for own, room in zip(kept, _rooms(trunk, group, capacity), strict=True)]
        parts = by_layers(parts, trunk.arch) if by_layer else parts
        return logits, Cache(parts, CachePlaces(lengths, jnp.zeros_like(lengths), jnp.int32(0)))

    def places(own: Shards) -> tuple:
        return (own.params, own.rows, own.rows, own.whole), (own.rows, own.cache)

    return on_each(shards, of_shard, places, parameters=True)(arrays, tokens, lengths, longest)


def _through(
    trunk: nnx.Module, tokens: jax.Array, lengths: jax.Array, longest: jax.Array, dtype: jnp.dtype, max_tokens: int
) -> tuple[jax.Array, list[Kept]]:
    """Rows of texts of these lengths through the decoder: the hidden state of the last token of each, and what is kept
    of all."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    reads = reads_of_rows(lengths - 1, tokens.shape[1])
    return with_keys(trunk, tokens, positions, reads, longest, dtype=dtype, max_tokens=max_tokens)


@partial(jax.jit, static_argnames=("graph", "max_tokens", "dtype", "by_layer", "shards"), donate_argnames=("state",))
def recomputed(
    graph: Any,
    arrays: dict[str, jax.Array],
    state: Decoding,
    texts: jax.Array,
    longest: jax.Array,
    *,
    max_tokens: int,
    dtype: jnp.dtype,
    by_layer: bool,
    shards: Shards | None = None,
) -> Decoding:
    """The state with keys and values as they are where the longest text has `longest` tokens: some ropes turn all
    tokens otherwise from a length on.

    Args:
        texts: int32 `[B, S + T]`, each prompt and behind it what its completion has; anything behind that.
    """


    def of_shard(arrays, state, texts, longest):
        filled = state.cache.places
        group = len(texts) // len(filled.prompt_lengths)
        lengths = jnp.maximum(jnp.repeat(filled.prompt_lengths + filled.own, group), 1)
        trunk = trunk_of(merge(graph, arrays))
        _, kept = _through(trunk, texts, lengths, longest, dtype, max_tokens)
        rooms = _rooms(trunk, group, state.capacity)
        parts = [own.cache_of_texts(filled, room) for own, room in zip(kept, rooms, strict=True)]
        return state._replace(cache=Cache(by_layers(parts, trunk.arch) if by_layer else parts, filled))

    def places(own: Shards) -> tuple:
        return (own.params, Decoding.places(own), own.rows, own.whole), Decoding.places(own)

    return on_each(shards, of_shard, places, parameters=True)(arrays, state, texts, longest)


def _rooms(trunk: nnx.Module, group: int, capacity: int) -> list[Room]:
    """The room of each part of the cache."""
    return [Room(group, capacity, part.window) for part in cache_parts(trunk.arch)]
