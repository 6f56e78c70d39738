"""The values that layers keep of tokens for those that follow: keys and values, the inputs of a short convolution, or
a state.

G completions follow one prompt and share its keys and values: P prompts have P x G rows of completions, those of a
prompt side by side. T counts the completions' places in the cache, S the prompts'.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


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
        own_PT = (jnp.arange(capacity) - places.begun[:, None]) % capacity + places.prompt_lengths[:, None]

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
        return self._replace(k_T=_wider(self.k_T, -1, more), v=_wider(self.v, -2, more))

    def selected(self, prompts: jax.Array, members: jax.Array) -> LayerCache:
        """That of the completions `members` `[P', G']` of `prompts` `[P']`."""
        at = (slice(None),) * (self.v.ndim - 5)  # an axis of layers, or none
        of_prompt, of_member = (*at, prompts), (*at, prompts[:, None], members)
        return LayerCache(self.prompt_k[of_prompt], self.prompt_v[of_prompt], self.k_T[of_member], self.v[of_member])

    def with_prompt_places(self, count: int) -> LayerCache:
        """With so many places for each prompt."""
        return self._replace(prompt_k=_sized(self.prompt_k, -2, count), prompt_v=_sized(self.prompt_v, -2, count))

    def refilled(self, slots: jax.Array, new: LayerCache) -> LayerCache:
        """With the prompts of `new` `[P']` at `slots`. What stood there of completions stays, and is not seen."""
        new, layers = new.with_prompt_places(self.prompt_v.shape[-2]), self.v.ndim - 5
        prompts = (_replaced(own, slots, other, layers) for own, other in zip(self[:2], new[:2], strict=True))
        return LayerCache(*prompts, self.k_T, self.v)


class ConvolutionInputs(NamedTuple):
    """Of one layer, or with a leading axis L of several: `[R, T, W, D]`, of each token its own and those before it, the
    last W that a convolution of W + 1 tokens will see from the next one on."""

    window: jax.Array

    def cache(self, lengths: jax.Array, group: int, capacity: int) -> ConvolutionCache:
        """The cache after prompts of these lengths, for `group` completions of each."""
        del capacity
        last = self.window[..., jnp.arange(len(lengths)), lengths - 1, :, :]
        return ConvolutionCache(jnp.repeat(last[..., None, :, :], group, axis=-3))


class ConvolutionCache(NamedTuple):
    """The last inputs of one layer's convolution, `[P, G, W, D]`, or with a leading axis L of several layers'."""

    window: jax.Array

    def appended(self, new: ConvolutionInputs, place: jax.Array) -> ConvolutionCache:
        """After one more token of every completion."""
        del place
        return ConvolutionCache(new.window.astype(self.window.dtype).reshape(self.window.shape))

    def grown(self, more: int) -> ConvolutionCache:
        """It needs no more places."""
        del more
        return self

    def selected(self, prompts: jax.Array, members: jax.Array) -> ConvolutionCache:
        """That of the completions `members` `[P', G']` of `prompts` `[P']`."""
        at = (slice(None),) * (self.window.ndim - 4)
        return ConvolutionCache(self.window[(*at, prompts[:, None], members)])

    def with_prompt_places(self, count: int) -> ConvolutionCache:
        """It has none."""
        del count
        return self

    def refilled(self, slots: jax.Array, new: ConvolutionCache) -> ConvolutionCache:
        """With the prompts of `new` `[P']` at `slots`."""
        return ConvolutionCache(_replaced(self.window, slots, new.window, self.window.ndim - 4))


class RecurrentState(NamedTuple):
    """Of one layer with a state, or with a leading axis L of several: the window of its convolution, `[R, T, W, D]` as
    in `ConvolutionInputs`, and the state after each row's text, float32 `[R, K, G, C, V]`."""

    window: jax.Array
    state: jax.Array

    def cache(self, lengths: jax.Array, group: int, capacity: int) -> RecurrentCache:
        """The cache after prompts of these lengths, for `group` completions of each."""
        window = ConvolutionInputs(self.window).cache(lengths, group, capacity).window
        return RecurrentCache(window, jnp.repeat(self.state[..., None, :, :, :, :], group, axis=-5))


class RecurrentCache(NamedTuple):
    """The state that each completion goes on from, in one layer or with a leading axis L in several: `window`
    `[P, G, W, D]`, the last inputs of its convolution, and `state`, float32 `[P, G, K, G', C, V]`, G' value
    heads for each key head."""

    window: jax.Array
    state: jax.Array

    def appended(self, new: RecurrentState, place: jax.Array) -> RecurrentCache:
        """After one more token of every completion."""
        window = ConvolutionCache(self.window).appended(ConvolutionInputs(new.window), place).window
        return RecurrentCache(window, new.state.reshape(self.state.shape))

    def grown(self, more: int) -> RecurrentCache:
        """It needs no more places."""
        del more
        return self

    def selected(self, prompts: jax.Array, members: jax.Array) -> RecurrentCache:
        """That of the completions `members` `[P', G']` of `prompts` `[P']`."""
        at = (slice(None),) * (self.window.ndim - 4)
        return RecurrentCache(*(x[(*at, prompts[:, None], members)] for x in self))

    def with_prompt_places(self, count: int) -> RecurrentCache:
        """It has none."""
        del count
        return self

    def refilled(self, slots: jax.Array, new: RecurrentCache) -> RecurrentCache:
        """With the prompts of `new` `[P']` at `slots`."""
        layers = self.window.ndim - 4
        return RecurrentCache(*(_replaced(old, slots, other, layers) for old, other in zip(self, new, strict=True)))


class NothingKept(NamedTuple):
    """Of a layer that sees each token by itself: what it keeps, and the cache of that."""

    def cache(self, lengths: jax.Array, group: int, capacity: int) -> NothingKept:
        del lengths, group, capacity
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

    def cache(self, lengths: jax.Array, group: int, capacity: int) -> BothCaches:
        """The caches after prompts of these lengths."""
        return BothCaches(*(part.cache(lengths, group, capacity) for part in self))


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


Kept = KeysValues | ConvolutionInputs | RecurrentState | NothingKept | BothKept
LayersCache = LayerCache | ConvolutionCache | RecurrentCache | NothingKept | BothCaches


class CachePlaces(NamedTuple):
    """How much of a cache is filled; all layers share it. The token that is computed comes next.

    prompt_lengths: int32 `[P]`, tokens of each prompt.
    begun: int32 `[P]`, how much was written when the completions of each prompt began: 0, unless they took the place of
        others.
    written: int32 scalar, how many tokens were written; completions have those since they began, the last ones.
    """

    prompt_lengths: jax.Array
    begun: jax.Array
    written: jax.Array

    @property
    def own(self) -> jax.Array:
        """Tokens of each prompt's completions that are in the cache, int32 `[P]`."""
        return self.written - self.begun


class Cache(NamedTuple):
    """All that is kept of P prompts and their P x G completions.

    parts: of each run of layers, with a leading axis L; or of each layer. places: how much of them is filled.
    """

    parts: list[LayersCache]
    places: CachePlaces

    def appended(self, new: list[Kept]) -> Cache:
        """With one more token of every completion, `new` part by part."""
        place = self.places.written
        parts = [own.appended(each, place) for own, each in zip(self.parts, new, strict=True)]
        return Cache(parts, self.places._replace(written=place + 1))

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


def _replaced(array: jax.Array, slots: jax.Array, new: jax.Array, axis: int) -> jax.Array:
    """With `new` at these places of an axis; a place that is not there is left out."""
    return array.at[(slice(None),) * axis + (slots,)].set(new.astype(array.dtype), mode="drop")


def _sized(array: jax.Array, axis: int, size: int) -> jax.Array:
    """With so many places on an axis, the first ones."""
    there = array.shape[axis]
    return jax.lax.slice_in_dim(array, 0, size, axis=axis) if size < there else _wider(array, axis, size - there)


def _wider(array: jax.Array, axis: int, more: int) -> jax.Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, more)
    return jnp.pad(array, widths)
