"""The keys and values of layers that attend."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trl_jax.nn.cache.places import CachePlaces, replaced, sized, wider


class KeysValues(NamedTuple):
    """Of one layer: `[R, T, K, C]` each, as attention makes them, or with a leading axis L of several."""

    k: jax.Array
    v: jax.Array

    def cache(self, lengths: jax.Array, group: int, capacity: int) -> LayerCache:
        """The cache after prompts of these lengths, with `capacity` empty places for each of `group` completions."""
        del lengths
        prompt_k, prompt_v = self.k.swapaxes(-2, -3), self.v.swapaxes(-2, -3)
        *lead, heads, _, channels = prompt_k.shape
        k_T = jnp.zeros((*lead, group, heads, channels, capacity), self.k.dtype)
        v = jnp.zeros((*lead, group, heads, capacity, prompt_v.shape[-1]), self.v.dtype)
        return LayerCache(prompt_k, prompt_v, k_T, v)

    def cache_of_texts(self, places: CachePlaces, group: int, capacity: int) -> LayerCache:
        """The cache of completions that stand behind their prompts in the rows, `group` of each prompt side by side."""
        prompts = len(places.prompt_lengths)
        own_PT = places.of_completions(capacity)

        def parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Those of prompts `[P, K, S, C]`, and of completions `[P, G, K, T, C]`."""
            *lead, _, length, heads, channels = x.shape
            of_rows = x.swapaxes(-2, -3).reshape(*lead, prompts, group, heads, length, channels)
            at = own_PT[:, None, None, :, None].reshape(*(1 for _ in lead), prompts, 1, 1, capacity, 1)
            own = jnp.take_along_axis(of_rows, at, axis=-2)
            return jax.lax.slice_in_dim(of_rows[..., 0, :, :, :], 0, length - capacity, axis=-2), own

        (prompt_k, k), (prompt_v, v) = parts(self.k), parts(self.v)
        return LayerCache(prompt_k, prompt_v, k.swapaxes(-1, -2), v)


class LayerCache(NamedTuple):
    """The keys and values of one layer, or with a leading axis L of several, in the dtype that layers compute in.

    prompt_k, prompt_v: `[P, K, S, C]`, prompts from place 0 on; what stands behind a prompt's end is never seen.
    k_T: `[P, G, K, C, T]`, keys of the completions, v: `[P, G, K, T, C]`. Either is laid out so that a product of one
        query with it reads memory in order.
    """

    prompt_k: jax.Array
    prompt_v: jax.Array
    k_T: jax.Array
    v: jax.Array

    def appended(self, new: KeysValues, place: jax.Array) -> LayerCache:
        """With one more token of every completion, at `place`, which goes around: the oldest is written over."""
        axis = self.v.ndim - 2  # of the places: the last but one in v, the last in k_T
        place = place % self.v.shape[axis]
        k, v = new.k.reshape(*self.k_T.shape[:-1], 1), new.v.reshape(*self.v.shape[:axis], 1, self.v.shape[-1])
        k_T = jax.lax.dynamic_update_slice_in_dim(self.k_T, k.astype(self.k_T.dtype), place, axis + 1)
        v = jax.lax.dynamic_update_slice_in_dim(self.v, v.astype(self.v.dtype), place, axis)
        return self._replace(k_T=k_T, v=v)

    def grown(self, more: int) -> LayerCache:
        """With so many more places."""
        return self._replace(k_T=wider(self.k_T, -1, more), v=wider(self.v, -2, more))

    def selected(self, prompts: jax.Array, members: jax.Array) -> LayerCache:
        """That of the completions `members` `[P', G']` of `prompts` `[P']`."""
        at = (slice(None),) * (self.v.ndim - 5)  # an axis of layers, or none
        of_prompt, of_member = (*at, prompts), (*at, prompts[:, None], members)
        return LayerCache(self.prompt_k[of_prompt], self.prompt_v[of_prompt], self.k_T[of_member], self.v[of_member])

    def with_prompt_places(self, count: int) -> LayerCache:
        """With so many places for each prompt."""
        return self._replace(prompt_k=sized(self.prompt_k, -2, count), prompt_v=sized(self.prompt_v, -2, count))

    def refilled(self, slots: jax.Array, new: LayerCache) -> LayerCache:
        """With the prompts of `new` `[P']` at `slots`. What stood there of completions stays, and is not seen."""
        new, layers = new.with_prompt_places(self.prompt_v.shape[-2]), self.v.ndim - 5
        prompts = (replaced(own, slots, other, layers) for own, other in zip(self[:2], new[:2], strict=True))
        return LayerCache(*prompts, self.k_T, self.v)
