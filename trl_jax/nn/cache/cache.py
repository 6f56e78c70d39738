"""All that is kept for completions: a part for layers that keep the same, or for each layer."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trl_jax.nn.cache.keys_values import KeysValues, LayerCache
from trl_jax.nn.cache.latents import LatentCache, Latents
from trl_jax.nn.cache.places import CachePlaces, Room
from trl_jax.nn.cache.states import ConvolutionCache, ConvolutionInputs, RecurrentCache, RecurrentState


class NothingKept(NamedTuple):
    """Of a layer that sees each token by itself: what it keeps, and the cache of that."""

    def cache(self, lengths: jax.Array, room: Room) -> NothingKept:
        del lengths, room
        return self

    def appended(self, new: NothingKept, place: jax.Array) -> NothingKept:
        del new, place
        return self

    def grown(self, more: int) -> NothingKept:
        del more
        return self

    def selected(self, prompts: jax.Array, members: jax.Array) -> NothingKept:
        del prompts, members
        return self

    def with_prompt_places(self, count: int) -> NothingKept:
        del count
        return self

    def refilled(self, slots: jax.Array, new: NothingKept) -> NothingKept:
        del slots, new
        return self


class BothKept(NamedTuple):
    """Of a layer that attends and has a state side by side."""

    keys_values: KeysValues
    state: RecurrentState

    def cache(self, lengths: jax.Array, room: Room) -> BothCaches:
        """The caches after prompts of these lengths."""
        return BothCaches(*(part.cache(lengths, room) for part in self))


class BothCaches(NamedTuple):
    """The caches of such a layer."""

    keys_values: LayerCache
    state: RecurrentCache

    def appended(self, new: BothKept, place: jax.Array) -> BothCaches:
        """With one more token of every completion, at `place`."""
        return BothCaches(*(own.appended(each, place) for own, each in zip(self, new, strict=True)))

    def grown(self, more: int) -> BothCaches:
        """With so many more places."""
        return BothCaches(*(own.grown(more) for own in self))

    def selected(self, prompts: jax.Array, members: jax.Array) -> BothCaches:
        """Those of the completions `members` `[P', G']` of `prompts` `[P']`."""
        return BothCaches(*(own.selected(prompts, members) for own in self))

    def with_prompt_places(self, count: int) -> BothCaches:
        """With so many places for each prompt."""
        return BothCaches(*(own.with_prompt_places(count) for own in self))

    def refilled(self, slots: jax.Array, new: BothCaches) -> BothCaches:
        """With the prompts of `new` `[P']` at `slots`."""
        return BothCaches(*(own.refilled(slots, other) for own, other in zip(self, new, strict=True)))


Kept = KeysValues | Latents | ConvolutionInputs | RecurrentState | NothingKept | BothKept
LayersCache = LayerCache | LatentCache | ConvolutionCache | RecurrentCache | NothingKept | BothCaches


class Cache(NamedTuple):
    """All that is kept of P prompts and their P x G completions.

    parts: of the layers of a run that see as many tokens, with a leading axis L; or of each layer. places: how much of
        them is filled.
    """

    parts: list[LayersCache]
    places: CachePlaces

    def appended(self, new: list[Kept], *, after: jax.Array) -> Cache:
        """With one more token of every completion, `new` part by part.

        Args:
            after: ids that were drawn by means of all of the cache, none below 0. The place that is written is made to
                depend on them: otherwise XLA sees no order between a step's reads and its writes, and copies the whole
                cache in each.
        """
        place = jnp.minimum(self.places.written, self.places.written + jnp.maximum(jnp.max(after), 0))
        parts = [own.appended(each, place) for own, each in zip(self.parts, new, strict=True)]
        return Cache(parts, self.places._replace(written=self.places.written + 1))

    def grown(self, more: int) -> Cache:
        """With so many more places for each completion."""
        return self._replace(parts=[own.grown(more) for own in self.parts])

    def selected(self, prompts: jax.Array, members: jax.Array) -> Cache:
        """That of the completions `members` `[P', G']` of `prompts` `[P']`."""
        lengths, begun, written = self.places
        places = CachePlaces(lengths[prompts], begun[prompts], written)
        return Cache([own.selected(prompts, members) for own in self.parts], places)

    def with_prompt_places(self, count: int) -> Cache:
        """With so many places for each prompt."""
        return self._replace(parts=[own.with_prompt_places(count) for own in self.parts])

    def refilled(self, slots: jax.Array, new: Cache) -> Cache:
        """With other prompts `[P']`, no longer than there is room for, at `slots`, their completions not yet begun. One
        whose slot is none of the P is left out."""
        parts = [own.refilled(slots, other) for own, other in zip(self.parts, new.parts, strict=True)]
        lengths, begun, written = self.places
        lengths = lengths.at[slots].set(new.places.prompt_lengths, mode="drop")
        return Cache(parts, CachePlaces(lengths, begun.at[slots].set(written, mode="drop"), written))
