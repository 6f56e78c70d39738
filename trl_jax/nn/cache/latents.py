"""The latents of layers with multi-head latent attention: what the keys and values of all heads are made of."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trl_jax.nn.cache.keys_values import LayerCache
from trl_jax.nn.cache.places import CachePlaces, Room, replaced, sized, wider


class Latents(NamedTuple):
    """Of one layer, or with a leading axis L of several: `[R, T, C]`, of each token the normed channels that keys and
    values come from, and behind them the turned channels of its key."""

    latent: jax.Array

    def cache(self, lengths: jax.Array, room: Room) -> LatentCache:
        """The cache after prompts of these lengths, the places of completions empty. No layer has a window."""
        del lengths
        *lead, _, channels = self.latent.shape
        return LatentCache(self.latent, jnp.zeros((*lead, room.group, room.capacity, channels), self.latent.dtype))

    def cache_of_texts(self, places: CachePlaces, room: Room) -> LatentCache:
        """The cache of completions that stand behind their prompts in the rows, those of a prompt side by side."""
        *lead, _, length, channels = self.latent.shape
        prompts = len(places.prompt_lengths)
        of_rows = self.latent.reshape(*lead, prompts, room.group, length, channels)
        at = places.of_completions(room.capacity)
        at = at.reshape(*(1 for _ in lead), prompts, 1, room.capacity, 1)
        prompt = jax.lax.slice_in_dim(of_rows[..., 0, :, :], 0, length - room.capacity, axis=-2)
        return LatentCache(prompt, jnp.take_along_axis(of_rows, at, axis=-2))


class LatentCache(NamedTuple):
    """The latents of one layer, or with a leading axis L of several: `[P, S, C]` of the prompts, from place 0 on, what
    stands behind a prompt's end being never seen; and `[P, G, T, C]` of the completions."""

    prompt: jax.Array
    own: jax.Array

    def as_keys_values(self, value_channels: int) -> LayerCache:
        """As the cache of one key head, whose values are the first channels of its keys."""
        prompt, own = (latents[..., None, :, :] for latents in self)
        return LayerCache(
            prompt, prompt[..., :value_channels], own.swapaxes(-1, -2), own[..., :value_channels]
        )

    def appended(self, new: Latents, place: jax.Array) -> LatentCache:
        """With one more token of every completion, at `place`, which goes around: the oldest is written over."""
        *lead, capacity, channels = self.own.shape
        latent = new.latent.astype(self.own.dtype).reshape(*lead, 1, channels)
        place = place % capacity
        return self._replace(own=jax.lax.dynamic_update_slice_in_dim(self.own, latent, place, len(lead)))

    def grown(self, more: int) -> LatentCache:
        """With so many more places."""
        return self._replace(own=wider(self.own, -2, more))

    def selected(self, prompts: jax.Array, members: jax.Array) -> LatentCache:
        """That of the completions `members` `[P', G']` of `prompts` `[P']`."""
        at = (slice(None),) * (self.own.ndim - 4)  # an axis of layers, or none
        return LatentCache(self.prompt[(*at, prompts)], self.own[(*at, prompts[:, None], members)])

    def with_prompt_places(self, count: int) -> LatentCache:
        """With so many places for each prompt."""
        return self._replace(prompt=sized(self.prompt, -2, count))

    def refilled(self, slots: jax.Array, new: LatentCache) -> LatentCache:
        """With the prompts of `new` `[P']` at `slots`. What stood there of completions stays, and is not seen."""
        new = new.with_prompt_places(self.prompt.shape[-2])
        return self._replace(prompt=replaced(self.prompt, slots, new.prompt, self.own.ndim - 4))
