"""The decoding cache: keys and values, latents, and recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trl_jax.mesh.mesh import TENSOR

# ----------------------------------------------------------------------------------------------------
# The latents of layers with multi-head latent attention: what the keys and values of all heads are made of.


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
        return LayerCache(prompt, prompt[..., :value_channels], own.swapaxes(-1, -2), own[..., :value_channels])

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


# ----------------------------------------------------------------------------------------------------
# The keys and values of layers that attend.


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


# ----------------------------------------------------------------------------------------------------
# The inputs of a short convolution, or a state, of layers that do not attend.


class ConvolutionInputs(NamedTuple):
    """Of one layer, or with a leading axis L of several: `[R, T, W, D]`, of each token its own and those before it, the
    last W that a convolution of W + 1 tokens will see from the next one on."""

    window: jax.Array

    def cache(self, lengths: jax.Array, room: Room) -> ConvolutionCache:
        """The cache after prompts of these lengths."""
        last = self.window[..., jnp.arange(len(lengths)), lengths - 1, :, :]
        return ConvolutionCache(jnp.repeat(last[..., None, :, :], room.group, axis=-3))


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
        return ConvolutionCache(replaced(self.window, slots, new.window, self.window.ndim - 4))


class RecurrentState(NamedTuple):
    """Of one layer with a state, or with a leading axis L of several: the window of its convolution, `[R, T, W, D]` as
    in `ConvolutionInputs`, and the state after each row's text, float32 `[R, K, G, C, V]`."""

    window: jax.Array
    state: jax.Array

    def cache(self, lengths: jax.Array, room: Room) -> RecurrentCache:
        """The cache after prompts of these lengths."""
        window = ConvolutionInputs(self.window).cache(lengths, room).window
        return RecurrentCache(window, jnp.repeat(self.state[..., None, :, :, :, :], room.group, axis=-5))


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
        return RecurrentCache(*(replaced(old, slots, other, layers) for old, other in zip(self, new, strict=True)))


# ----------------------------------------------------------------------------------------------------
# How much of a cache is filled, and arrays with other places.


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

    def tokens_back(self, capacity: int) -> jax.Array:
        """How many tokens before the one that is computed each of `capacity` places was written, int32 `[T]`: 1 for the
        last."""
        return (self.written - 1 - jnp.arange(capacity)) % capacity + 1

    def of_completions(self, capacity: int) -> jax.Array:
        """Where in a text, its prompt included, the token at each of `capacity` places stands, int32 `[P, T]`; anywhere
        where there is none yet."""
        return jnp.maximum(self.own[:, None] - self.tokens_back(capacity), 0) + self.prompt_lengths[:, None]


class Room(NamedTuple):
    """The room that a cache makes: `capacity` places for each of `group` completions of a prompt. Layers that see no
    more than `window` tokens keep no more, of a prompt as of a completion; None where they see all."""

    group: int
    capacity: int
    window: int | None = None

    @property
    def places(self) -> int:
        """Places for each completion."""
        return within(self.window, self.capacity)


def within(window: int | None, count: int) -> int:
    """`count` places, or as many as a window has."""
    return count if window is None else min(window, count)


def zeros_by_head(shape: Sequence[int], heads: int, dtype: jnp.dtype) -> jax.Array:
    """Zeros with an axis of heads, on which the devices along `tensor` have them that have the heads' products."""
    zeros, devices = jnp.zeros(shape, dtype), jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)
    if devices == 1 or shape[heads] % devices:
        return zeros
    axes = [None] * len(shape)
    axes[heads] = TENSOR
    return jax.lax.with_sharding_constraint(zeros, PartitionSpec(*axes))


def of_prompts(lengths: jax.Array, count: int) -> jax.Array:
    """Where in its prompt the token at each of `count` places stands, int32 `[P, S]`: from 0 on, or where a prompt is
    longer those of its last tokens."""
    return jnp.maximum(lengths - count, 0)[:, None] + jnp.arange(count)


def replaced(array: jax.Array, slots: jax.Array, new: jax.Array, axis: int) -> jax.Array:
    """With `new` at these places of an axis; a place that is not there is left out."""
    return array.at[(slice(None),) * axis + (slots,)].set(new.astype(array.dtype), mode="drop")


def sized(array: jax.Array, axis: int, size: int) -> jax.Array:
    """With so many places on an axis, the first ones."""
    there = array.shape[axis]
    return jax.lax.slice_in_dim(array, 0, size, axis=axis) if size < there else wider(array, axis, size - there)


def wider(array: jax.Array, axis: int, more: int) -> jax.Array:
    """With so many more places on an axis."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, more)
    return jnp.pad(array, widths)


# ----------------------------------------------------------------------------------------------------
# All that is kept for completions: a part for layers that keep the same, or for each layer.


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
