"""The keys and values of layers that attend."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trl_jax.nn.cache.places import CachePlaces, Room, of_prompts, replaced, sized, wider, within, zeros_by_head


class KeysValues(NamedTuple):
    """Of one layer: `[R, T, K, C]` each, as attention makes them, or with a leading axis L of several."""

    k: jax.Array
    v: jax.Array

    def cache(self, lengths: jax.Array, room: Room) -> LayerCache:
        """The cache after prompts of these lengths, the places of completions empty."""
        k, v = self.k.swapaxes(-2, -3), self.v.swapaxes(-2, -3)
        *lead, heads, _, channels = k.shape
        lead = (*lead, room.group, heads)
        k_T = zeros_by_head((*lead, channels, room.places), len(lead) - 1, k.dtype)
        own = zeros_by_head((*lead, room.places, v.shape[-1]), len(lead) - 1, v.dtype)
        prompts = (_last(x, lengths, room.window) for x in (k, v))
        return LayerCache(*prompts, k_T, own, room.window)

    def cache_of_texts(self, places: CachePlaces, room: Room) -> LayerCache:
        """The cache of completions that stand behind their prompts in the rows, those of a prompt side by side."""
        prompts = len(places.prompt_lengths)
        own_PT = places.of_completions(room.places)

        def parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Those of prompts `[P, K, S, C]`, and of completions `[P, G, K, T, C]`."""
            *lead, _, length, heads, channels = x.shape
            of_rows = x.swapaxes(-2, -3).reshape(*lead, prompts, room.group, heads, length, channels)
            at = own_PT[:, None, None, :, None].reshape(*(1 for _ in lead), prompts, 1, 1, room.places, 1)
            first = jax.lax.slice_in_dim(of_rows[..., 0, :, :, :], 0, length - room.capacity, axis=-2)
            return _last(first, places.prompt_lengths, room.window), jnp.take_along_axis(of_rows, at, axis=-2)

        (prompt_k, k), (prompt_v, v) = parts(self.k), parts(self.v)
        return LayerCache(prompt_k, prompt_v, k.swapaxes(-1, -2), v, room.window)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """The keys and values of one layer, or with a leading axis L of several, in the dtype that layers compute in.

    prompt_k, prompt_v: `[P, K, S, C]`, prompts from place 0 on, of longer ones the last S tokens; what stands behind a
        prompt's end is never seen.
    k_T: `[P, G, K, C, T]`, keys of the completions, v: `[P, G, K, T, C]`. Either is laid out so that a product of one
        query with it reads memory in order.
    window: how many tokens the layers see, so that S and T need be no more; None where they see all.
    """

    prompt_k: jax.Array
    prompt_v: jax.Array
    k_T: jax.Array
    v: jax.Array
    window: int | None = field(default=None, metadata={"static": True})

    def appended(self, new: KeysValues, place: jax.Array) -> LayerCache:
        """With one more token of every completion, at `place`, which goes around: the oldest is written over."""
        axis = self.v.ndim - 2  # of the places: the last but one in v, the last in k_T
        place = place % self.v.shape[axis]
        k, v = new.k.reshape(*self.k_T.shape[:-1], 1), new.v.reshape(*self.v.shape[:axis], 1, self.v.shape[-1])
        k_T = jax.lax.dynamic_update_slice_in_dim(self.k_T, k.astype(self.k_T.dtype), place, axis + 1)
        v = jax.lax.dynamic_update_slice_in_dim(self.v, v.astype(self.v.dtype), place, axis)
        return replace(self, k_T=k_T, v=v)

    def grown(self, more: int) -> LayerCache:
        """With so many more places, of which none was written twice yet; where they are as many as the layers see, they
        stay."""
        places = self.v.shape[-2]
        more = max(within(self.window, places + more) - places, 0)
        return replace(self, k_T=wider(self.k_T, -1, more), v=wider(self.v, -2, more))

    def selected(self, prompts: jax.Array, members: jax.Array) -> LayerCache:
        """That of the completions `members` `[P', G']` of `prompts` `[P']`."""
        at = (slice(None),) * (self.v.ndim - 5)  # an axis of layers, or none
        of_prompt, of_member = (*at, prompts), (*at, prompts[:, None], members)
        own = {"k_T": self.k_T[of_member], "v": self.v[of_member]}
        return replace(self, prompt_k=self.prompt_k[of_prompt], prompt_v=self.prompt_v[of_prompt], **own)

    def with_prompt_places(self, count: int) -> LayerCache:
        """With so many places for each prompt, none of which is longer; or as many as the layers see."""
        count = within(self.window, count)
        return replace(self, prompt_k=sized(self.prompt_k, -2, count), prompt_v=sized(self.prompt_v, -2, count))

    def refilled(self, slots: jax.Array, new: LayerCache) -> LayerCache:
        """With the prompts of `new` `[P']` at `slots`. What stood there of completions stays, and is not seen."""
        new, layers = new.with_prompt_places(self.prompt_v.shape[-2]), self.v.ndim - 5
        k, v = (
            replaced(own, slots, other, layers)
            for own, other in ((self.prompt_k, new.prompt_k), (self.prompt_v, new.prompt_v))
        )
        return replace(self, prompt_k=k, prompt_v=v)


def _last(x: jax.Array, lengths: jax.Array, window: int | None) -> jax.Array:
    """Of `[..., P, K, S, C]` those of the prompts' last tokens, as many as a window has."""
    places = within(window, x.shape[-2])
    if places == x.shape[-2]:
        return x
    at = of_prompts(lengths, places).reshape(*(1 for _ in x.shape[:-4]), len(lengths), 1, places, 1)
    return jnp.take_along_axis(x, at, axis=-2)
