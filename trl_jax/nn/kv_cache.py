"""Keys and values of tokens, kept for the tokens that follow them.

G completions follow one prompt and share its keys and values: P prompts have P x G rows of completions, those of a
prompt side by side. T counts the completions' places in the cache, S the prompts'.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KeysValues(NamedTuple):
    """Of one layer: `[R, T, K, C]` each, as attention makes them, or with a leading axis L of all layers."""

    k: jax.Array
    v: jax.Array


class LayerCache(NamedTuple):
    """One layer's part of a cache, or with a leading axis L all layers', in the dtype that layers compute in.

    prompt_k, prompt_v: `[P, K, S, C]`, prompts from place 0 on; what stands behind a prompt's end is never seen.
    k_T: `[P, G, K, C, T]`, keys of the completions, v: `[P, G, K, T, C]`. Either is laid out so that a product of one
        query with it reads memory in order.
    """

    prompt_k: jax.Array
    prompt_v: jax.Array
    k_T: jax.Array
    v: jax.Array


class CachePlaces(NamedTuple):
    """How much of a cache is filled; all layers share it. The token that is computed comes next.

    prompt_lengths: int32 `[P]`, tokens of each prompt.
    written: int32 scalar, tokens of every completion that are in the cache.
    """

    prompt_lengths: jax.Array
    written: jax.Array


class Cache(NamedTuple):
    """Keys and values of P prompts and their P x G completions.

    layers: all layers' in one, or a list of each one's. places: how much of them is filled.
    """

    layers: LayerCache | list[LayerCache]
    places: CachePlaces

    def appended(self, new: KeysValues) -> Cache:
        """With one more token of every completion, `[L, P x G, 1, K, C]`."""
        place = self.places.written
        if isinstance(self.layers, list):
            layers = [_appended(own, new.k[i], new.v[i], place) for i, own in enumerate(self.layers)]
        else:
            layers = _appended(self.layers, new.k, new.v, place)
        return Cache(layers, self.places._replace(written=place + 1))


def _appended(layer: LayerCache, k: jax.Array, v: jax.Array, place: jax.Array) -> LayerCache:
    axis = layer.v.ndim - 2  # of the places: the last but one in v, the last in k_T
    k, v = k.reshape(*layer.k_T.shape[:-1], 1), v.reshape(*layer.v.shape[:axis], 1, layer.v.shape[-1])
    k_T = jax.lax.dynamic_update_slice_in_dim(layer.k_T, k.astype(layer.k_T.dtype), place, axis + 1)
    return layer._replace(k_T=k_T, v=jax.lax.dynamic_update_slice_in_dim(layer.v, v.astype(layer.v.dtype), place, axis))


def of_prompts(kept: KeysValues, group: int, capacity: int) -> LayerCache:
    """The cache of all layers after prompts, whose keys and values are `[L, P, S, K, C]`, with `capacity` empty places
    for each of `group` completions of a prompt."""
    prompt_k, prompt_v = kept.k.swapaxes(2, 3), kept.v.swapaxes(2, 3)
    count, prompts, heads, _, channels = prompt_k.shape
    empty = (count, prompts, group, heads)
    k_T = jnp.zeros((*empty, channels, capacity), kept.k.dtype)
    v = jnp.zeros((*empty, capacity, channels), kept.v.dtype)
    return LayerCache(prompt_k, prompt_v, k_T, v)
