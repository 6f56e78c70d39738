"""The decoding cache: keys and values, latents, and recurrent states.

Each kind of layer has two classes: what a forward pass produces (`KeysValues`, ...) and what the cache stores
(`LayerCache`, ...). Fields have the shapes given for one layer, or a leading axis L for several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trl_jax.mesh.mesh import TENSOR

# Attention


class KeysValues(NamedTuple):
    """Keys and values of new tokens, `[R, T, K, C]` each."""

    k: jax.Array
    v: jax.Array

    def cache(self, lengths: jax.Array, room: Room) -> LayerCache:
        """The cache after prompts of these lengths, without completions."""
        k, v = self.k.swapaxes(-2, -3), self.v.swapaxes(-2, -3)
        *lead, heads, _, channels = k.shape
        lead = (*lead, room.group, heads)
        k_T = zeros_by_head((*lead, channels, room.per_completion), len(lead) - 1, k.dtype)
        own = zeros_by_head((*lead, room.per_completion, v.shape[-1]), len(lead) - 1, v.dtype)
        prompts = (_last_tokens(x, lengths, room.window) for x in (k, v))
        return LayerCache(*prompts, k_T, own, room.window)

    def cache_of_texts(self, fill: CacheFill, room: Room) -> LayerCache:
        """The cache of completions that follow their prompts in the rows; completions of a prompt are adjacent rows."""
        prompts = len(fill.prompt_lengths)
        own_PT = fill.of_completions(room.per_completion)

        def parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            """For prompts `[P, K, S, C]`, and for completions `[P, G, K, T, C]`."""
            *lead, _, length, heads, channels = x.shape
            of_rows = x.swapaxes(-2, -3).reshape(*lead, prompts, room.group, heads, length, channels)
            at = own_PT[:, None, None, :, None].reshape(*(1 for _ in lead), prompts, 1, 1, room.per_completion, 1)
            first = jax.lax.slice_in_dim(of_rows[..., 0, :, :, :], 0, length - room.capacity, axis=-2)
            return _last_tokens(first, fill.prompt_lengths, room.window), jnp.take_along_axis(of_rows, at, axis=-2)

        (prompt_k, k), (prompt_v, v) = parts(self.k), parts(self.v)
        return LayerCache(prompt_k, prompt_v, k.swapaxes(-1, -2), v, room.window)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """Keys and values in the compute dtype.

    prompt_k, prompt_v: `[P, K, S, C]`, prompts from place 0 on; of longer prompts, the last S tokens. Entries past a
        prompt's end are never attended to.
    k_T: `[P, G, K, C, T]`, keys of completions. v: `[P, G, K, T, C]`, their values. Both layouts let a product with
        one query read memory sequentially.
    window: the most tokens that the layers attend to, which bounds S and T; None for no limit.
    """

    prompt_k: jax.Array
    prompt_v: jax.Array
    k_T: jax.Array
    v: jax.Array
    window: int | None = field(default=None, metadata={"static": True})

    def appended(self, new: KeysValues, place: jax.Array, alive: jax.Array | None) -> LayerCache:
        """Add a token to every completion at `place`, modulo the capacity: the oldest is overwritten."""
        axis = self.v.ndim - 2  # tokens are the second to last axis of v, the last of k_T
        place = place % self.v.shape[axis]
        k, v = new.k.reshape(*self.k_T.shape[:-1], 1), new.v.reshape(*self.v.shape[:axis], 1, self.v.shape[-1])
        if alive is not None and self.window is not None:  # without a window, nothing is overwritten
            old_k = jax.lax.dynamic_slice_in_dim(self.k_T, place, 1, axis + 1)
            old_v = jax.lax.dynamic_slice_in_dim(self.v, place, 1, axis)
            k, v = _where(alive, k, old_k, self.v.ndim - 5), _where(alive, v, old_v, self.v.ndim - 5)
        k_T = jax.lax.dynamic_update_slice_in_dim(self.k_T, k.astype(self.k_T.dtype), place, axis + 1)
        v = jax.lax.dynamic_update_slice_in_dim(self.v, v.astype(self.v.dtype), place, axis)
        return replace(self, k_T=k_T, v=v)

    def grown(self, more: int, written: jax.Array, grow: Grow) -> LayerCache:
        """Increase the capacity for completions, up to the window."""
        old = self.v.shape[-2]
        size = max(within(self.window, old + more), old)
        return replace(self, k_T=grow(self.k_T, written, -1, size), v=grow(self.v, written, -2, size))

    def selected(self, select: Select) -> LayerCache:
        """Select some completions."""
        axis = self.v.ndim - 5  # of prompts: 1 if there is an axis of layers
        own = {name: select(array, axis, True) for name, array in (("k_T", self.k_T), ("v", self.v))}
        prompt_k, prompt_v = (select(array, axis, False) for array in (self.prompt_k, self.prompt_v))
        return replace(self, prompt_k=prompt_k, prompt_v=prompt_v, **own)

    def with_prompt_capacity(self, count: int) -> LayerCache:
        """Resize to `count` tokens per prompt, or the window if that is smaller. No prompt may be longer."""
        count = within(self.window, count)
        return replace(self, prompt_k=sized(self.prompt_k, -2, count), prompt_v=sized(self.prompt_v, -2, count))

    def refilled(self, slots: jax.Array, new: LayerCache) -> LayerCache:
        """Replace the prompts at `slots` by those of `new` `[P']`. Old completions stay, but are no longer visible."""
        new, layers = new.with_prompt_capacity(self.prompt_v.shape[-2]), self.v.ndim - 5
        k, v = (
            replaced(own, slots, other, layers)
            for own, other in ((self.prompt_k, new.prompt_k), (self.prompt_v, new.prompt_v))
        )
        return replace(self, prompt_k=k, prompt_v=v)

    def empty(self, rows: int, length: int, room: Room) -> LayerCache:
        """A cache like this one for `rows` prompts of up to `length` tokens."""
        *lead, _, heads, _, channels = self.prompt_k.shape
        sizes, own = (channels, self.v.shape[-1]), (*lead, rows, room.group, heads)
        length, capacity = within(self.window, length), within(self.window, room.capacity)
        prompts = (jnp.zeros((*lead, rows, heads, length, size), self.v.dtype) for size in sizes)
        k_T, v = (*own, sizes[0], capacity), (*own, capacity, sizes[1])
        return LayerCache(*prompts, jnp.zeros(k_T, self.v.dtype), jnp.zeros(v, self.v.dtype), self.window)

    def with_texts(self, earlier: LayerCache, texts: CachedTexts) -> LayerCache:
        """Set prompts to texts (prompt and completion) of an earlier cache."""
        k = texts.joined(self.prompt_k, earlier.prompt_k, earlier.k_T.swapaxes(-1, -2))
        return replace(self, prompt_k=k, prompt_v=texts.joined(self.prompt_v, earlier.prompt_v, earlier.v))

    def extended(self, new: KeysValues, lengths: jax.Array, more: jax.Array) -> LayerCache:
        """Append the first `more` `[P]` tokens of `new` `[P, T]` to prompts of these `lengths` `[P]`; they must fit."""
        k, v = (
            _extended(prompt, own.swapaxes(-2, -3), lengths, more, self.window)
            for prompt, own in ((self.prompt_k, new.k), (self.prompt_v, new.v))
        )
        return replace(self, prompt_k=k, prompt_v=v)


def _extended(
    prompts: jax.Array, new: jax.Array, lengths: jax.Array, more: jax.Array, window: int | None = None
) -> jax.Array:
    """`[..., P, K, S, C]` with tokens of `[..., P, K, T, C]` appended; of prompts longer than the window, the last S
    tokens."""
    count = prompts.shape[-2]
    place = of_prompts(lengths + more, count)
    if window is not None:
        prompts = _tokens(prompts, place - jnp.maximum(lengths - count, 0)[:, None])
    is_new = ((place >= lengths[:, None]) & (place < (lengths + more)[:, None]))[:, None, :, None]
    return jnp.where(is_new, _tokens(new, place - lengths[:, None]).astype(prompts.dtype), prompts)


def _tokens(x: jax.Array, places: jax.Array) -> jax.Array:
    """The tokens of `[..., R, K, S, C]` at these places, int32 `[R, T]`; places out of range give any token."""
    at = jnp.clip(places, 0, x.shape[-2] - 1)[:, None, :, None]
    return jnp.take_along_axis(x, at.reshape(*(1 for _ in x.shape[:-4]), *at.shape), axis=-2)


def _where(which: jax.Array, new: jax.Array, old: jax.Array, layers: int) -> jax.Array:
    """`jnp.where` for `which` `[P x G]` and arrays `[..., P, G, ...]`, after `layers` axes."""
    shape = *(1 for _ in range(layers)), *new.shape[layers : layers + 2], *(1 for _ in new.shape[layers + 2 :])
    return jnp.where(which.reshape(shape), new, old)


def _last_tokens(x: jax.Array, lengths: jax.Array, window: int | None) -> jax.Array:
    """Reduce `[..., P, K, S, C]` to the last tokens of each prompt, as many as fit into the window."""
    count = within(window, x.shape[-2])
    if count == x.shape[-2]:
        return x
    at = of_prompts(lengths, count).reshape(*(1 for _ in x.shape[:-4]), len(lengths), 1, count, 1)
    return jnp.take_along_axis(x, at, axis=-2)


# Multi-head latent attention


class Latents(NamedTuple):
    """`[R, T, C]`: for each token the normed channels from which keys and values are computed, followed by the rotated
    channels of its key."""

    latent: jax.Array

    def cache(self, lengths: jax.Array, room: Room) -> LatentCache:
        """The cache after prompts of these lengths, without completions. These layers have no windows."""
        del lengths
        *lead, _, channels = self.latent.shape
        return LatentCache(self.latent, jnp.zeros((*lead, room.group, room.capacity, channels), self.latent.dtype))

    def cache_of_texts(self, fill: CacheFill, room: Room) -> LatentCache:
        """The cache of completions that follow their prompts in the rows; completions of a prompt are adjacent rows."""
        *lead, _, length, channels = self.latent.shape
        prompts = len(fill.prompt_lengths)
        of_rows = self.latent.reshape(*lead, prompts, room.group, length, channels)
        at = fill.of_completions(room.capacity)
        at = at.reshape(*(1 for _ in lead), prompts, 1, room.capacity, 1)
        prompt = jax.lax.slice_in_dim(of_rows[..., 0, :, :], 0, length - room.capacity, axis=-2)
        return LatentCache(prompt, jnp.take_along_axis(of_rows, at, axis=-2))


class LatentCache(NamedTuple):
    """Latents of prompts, `[P, S, C]`, and of completions, `[P, G, T, C]`. Entries past a prompt's end are never
    attended to."""

    prompt: jax.Array
    own: jax.Array

    def as_keys_values(self, value_channels: int) -> LayerCache:
        """View as the cache of a single key head whose values are the first channels of its keys."""
        prompt, own = (latents[..., None, :, :] for latents in self)
        return LayerCache(prompt, prompt[..., :value_channels], own.swapaxes(-1, -2), own[..., :value_channels])

    def appended(self, new: Latents, place: jax.Array, alive: jax.Array | None) -> LatentCache:
        """Add a token to every completion, at `place`."""
        del alive  # without windows, nothing is overwritten
        *lead, capacity, channels = self.own.shape
        latent = new.latent.astype(self.own.dtype).reshape(*lead, 1, channels)
        place = place % capacity
        return self._replace(own=jax.lax.dynamic_update_slice_in_dim(self.own, latent, place, len(lead)))

    def grown(self, more: int, written: jax.Array, grow: Grow) -> LatentCache:
        """Increase the capacity for completions."""
        return self._replace(own=grow(self.own, written, -2, self.own.shape[-2] + more))

    def selected(self, select: Select) -> LatentCache:
        """Select some completions."""
        axis = self.own.ndim - 4  # of prompts: 1 if there is an axis of layers
        return LatentCache(select(self.prompt, axis, False), select(self.own, axis, True))

    def with_prompt_capacity(self, count: int) -> LatentCache:
        """Resize to `count` tokens per prompt."""
        return self._replace(prompt=sized(self.prompt, -2, count))

    def refilled(self, slots: jax.Array, new: LatentCache) -> LatentCache:
        """Replace the prompts at `slots` by those of `new` `[P']`. Old completions stay, but are no longer visible."""
        new = new.with_prompt_capacity(self.prompt.shape[-2])
        return self._replace(prompt=replaced(self.prompt, slots, new.prompt, self.own.ndim - 4))

    def empty(self, rows: int, length: int, room: Room) -> LatentCache:
        """A cache like this one for `rows` prompts of up to `length` tokens."""
        *lead, _, _, channels = self.prompt.shape
        shapes = (*lead, rows, length, channels), (*lead, rows, room.group, room.capacity, channels)
        return LatentCache(*(jnp.zeros(shape, self.own.dtype) for shape in shapes))

    def with_texts(self, earlier: LatentCache, texts: CachedTexts) -> LatentCache:
        """Set prompts to texts (prompt and completion) of an earlier cache."""
        mine, prompt, own = (each[..., None, :, :] for each in (self.prompt, *earlier))
        return self._replace(prompt=texts.joined(mine, prompt, own)[..., 0, :, :])

    def extended(self, new: Latents, lengths: jax.Array, more: jax.Array) -> LatentCache:
        """Append the first `more` `[P]` tokens of `new` `[P, T]` to prompts of these `lengths` `[P]`; they must fit."""
        prompt, latent = self.prompt[..., None, :, :], new.latent[..., None, :, :]
        return self._replace(prompt=_extended(prompt, latent, lengths, more)[..., 0, :, :])


# Convolutions and recurrent layers


class ConvolutionInputs(NamedTuple):
    """`[R, T, W, D]`: for each token, the window of W inputs (its own last) that a convolution over W + 1 tokens needs
    for the next token."""

    window: jax.Array

    def cache(self, lengths: jax.Array, room: Room) -> ConvolutionCache:
        """The cache after prompts of these lengths."""
        last = self.window[..., jnp.arange(len(lengths)), lengths - 1, :, :]
        return ConvolutionCache(jnp.repeat(last[..., None, :, :], room.group, axis=-3))


class ConvolutionCache(NamedTuple):
    """The last inputs of the convolution, `[P, G, W, D]`."""

    window: jax.Array

    def appended(self, new: ConvolutionInputs, place: jax.Array, alive: jax.Array | None) -> ConvolutionCache:
        """Add a token to every completion."""
        del place
        window = new.window.astype(self.window.dtype).reshape(self.window.shape)
        return ConvolutionCache(window if alive is None else _where(alive, window, self.window, self.window.ndim - 4))

    def grown(self, more: int, written: jax.Array, grow: Grow) -> ConvolutionCache:
        """No change: the size does not depend on the number of tokens."""
        del more, written, grow
        return self

    def selected(self, select: Select) -> ConvolutionCache:
        """Select some completions."""
        return ConvolutionCache(select(self.window, self.window.ndim - 4, True))

    def with_prompt_capacity(self, count: int) -> ConvolutionCache:
        """No change: nothing is stored per prompt token."""
        del count
        return self

    def refilled(self, slots: jax.Array, new: ConvolutionCache) -> ConvolutionCache:
        """Replace the prompts at `slots` by those of `new` `[P']`."""
        return ConvolutionCache(replaced(self.window, slots, new.window, self.window.ndim - 4))

    def empty(self, rows: int, length: int, room: Room) -> ConvolutionCache:
        """A cache like this one for `rows` prompts with one completion each."""
        del length
        return ConvolutionCache(_zeros_like(self.window, rows, room, self.window.ndim - 4))

    def with_texts(self, earlier: ConvolutionCache, texts: CachedTexts) -> ConvolutionCache:
        """Set prompts to texts (prompt and completion) of an earlier cache."""
        return ConvolutionCache(texts.of_completions(self.window, earlier.window, self.window.ndim - 4))

    def extended(self, new: ConvolutionInputs, lengths: jax.Array, more: jax.Array) -> ConvolutionCache:
        """Append the first `more` `[P]` tokens of `new` `[P, T]` to prompts with one completion each."""
        del lengths
        last = new.window[..., jnp.arange(len(more)), jnp.maximum(more - 1, 0), :, :]
        last = jnp.expand_dims(last.astype(self.window.dtype), -3)
        return ConvolutionCache(_where(more > 0, last, self.window, self.window.ndim - 4))


def _zeros_like(array: jax.Array, rows: int, room: Room, layers: int) -> jax.Array:
    """Zeros like `[..., P, G, ...]`, after `layers` axes, for other numbers of prompts and completions."""
    return jnp.zeros((*array.shape[:layers], rows, room.group, *array.shape[layers + 2 :]), array.dtype)


class RecurrentState(NamedTuple):
    """The convolution window of each token, `[R, T, W, D]` as in `ConvolutionInputs`, and the state after each row's
    text, float32 `[R, K, G, C, V]`."""

    window: jax.Array
    state: jax.Array

    def cache(self, lengths: jax.Array, room: Room) -> RecurrentCache:
        """The cache after prompts of these lengths."""
        window = ConvolutionInputs(self.window).cache(lengths, room).window
        return RecurrentCache(window, jnp.repeat(self.state[..., None, :, :, :, :], room.group, axis=-5))


class RecurrentCache(NamedTuple):
    """The state of each completion: `window` `[P, G, W, D]`, the last inputs of the convolution, and `state`, float32
    `[P, G, K, G', C, V]`, with G' value heads per key head."""

    window: jax.Array
    state: jax.Array

    def appended(self, new: RecurrentState, place: jax.Array, alive: jax.Array | None) -> RecurrentCache:
        """Add a token to every completion."""
        window = ConvolutionCache(self.window).appended(ConvolutionInputs(new.window), place, alive).window
        state = new.state.reshape(self.state.shape)
        return RecurrentCache(
            window, state if alive is None else _where(alive, state, self.state, self.window.ndim - 4)
        )

    def grown(self, more: int, written: jax.Array, grow: Grow) -> RecurrentCache:
        """No change: the size does not depend on the number of tokens."""
        del more, written, grow
        return self

    def selected(self, select: Select) -> RecurrentCache:
        """Select some completions."""
        return RecurrentCache(*(select(x, self.window.ndim - 4, True) for x in self))

    def with_prompt_capacity(self, count: int) -> RecurrentCache:
        """No change: nothing is stored per prompt token."""
        del count
        return self

    def refilled(self, slots: jax.Array, new: RecurrentCache) -> RecurrentCache:
        """Replace the prompts at `slots` by those of `new` `[P']`."""
        layers = self.window.ndim - 4
        return RecurrentCache(*(replaced(old, slots, other, layers) for old, other in zip(self, new, strict=True)))

    def empty(self, rows: int, length: int, room: Room) -> RecurrentCache:
        """A cache like this one for `rows` prompts with one completion each."""
        del length
        return RecurrentCache(*(_zeros_like(each, rows, room, self.window.ndim - 4) for each in self))

    def with_texts(self, earlier: RecurrentCache, texts: CachedTexts) -> RecurrentCache:
        """Set prompts to texts (prompt and completion) of an earlier cache."""
        each, layers = zip(self, earlier, strict=True), self.window.ndim - 4
        return RecurrentCache(*(texts.of_completions(own, other, layers) for own, other in each))

    def extended(self, new: RecurrentState, lengths: jax.Array, more: jax.Array) -> RecurrentCache:
        """Append the first `more` `[P]` tokens of `new` `[P, T]` to prompts with one completion each."""
        window = ConvolutionCache(self.window).extended(ConvolutionInputs(new.window), lengths, more).window
        return RecurrentCache(window, new.state.reshape(self.state.shape))


# The cache of a model


class NothingKept(NamedTuple):
    """For layers that process each token by itself: they keep nothing, and need no cache."""

    def cache(self, lengths: jax.Array, room: Room) -> NothingKept:
        del lengths, room
        return self

    def appended(self, new: NothingKept, place: jax.Array, alive: jax.Array | None) -> NothingKept:
        del new, place, alive
        return self

    def grown(self, more: int, written: jax.Array, grow: Grow) -> NothingKept:
        del more, written, grow
        return self

    def selected(self, select: Select) -> NothingKept:
        del select
        return self

    def with_prompt_capacity(self, count: int) -> NothingKept:
        del count
        return self

    def refilled(self, slots: jax.Array, new: NothingKept) -> NothingKept:
        del slots, new
        return self

    def empty(self, rows: int, length: int, room: Room) -> NothingKept:
        del rows, length, room
        return self

    def with_texts(self, earlier: NothingKept, texts: CachedTexts) -> NothingKept:
        del earlier, texts
        return self

    def extended(self, new: NothingKept, lengths: jax.Array, more: jax.Array) -> NothingKept:
        del new, lengths, more
        return self


class BothKept(NamedTuple):
    """For layers that run attention and a recurrent mixer in parallel."""

    keys_values: KeysValues
    state: RecurrentState

    def cache(self, lengths: jax.Array, room: Room) -> BothCaches:
        """The caches after prompts of these lengths, without completions."""
        return BothCaches(*(part.cache(lengths, room) for part in self))


class BothCaches(NamedTuple):
    """The cache of layers that run attention and a recurrent mixer in parallel."""

    keys_values: LayerCache
    state: RecurrentCache

    def appended(self, new: BothKept, place: jax.Array, alive: jax.Array | None) -> BothCaches:
        """Add a token to every completion, at `place`."""
        return BothCaches(*(own.appended(each, place, alive) for own, each in zip(self, new, strict=True)))

    def grown(self, more: int, written: jax.Array, grow: Grow) -> BothCaches:
        """Increase the capacity for completions."""
        return BothCaches(*(own.grown(more, written, grow) for own in self))

    def selected(self, select: Select) -> BothCaches:
        """Select some completions."""
        return BothCaches(*(own.selected(select) for own in self))

    def with_prompt_capacity(self, count: int) -> BothCaches:
        """Resize to `count` tokens per prompt."""
        return BothCaches(*(own.with_prompt_capacity(count) for own in self))

    def refilled(self, slots: jax.Array, new: BothCaches) -> BothCaches:
        """Replace the prompts at `slots` by those of `new` `[P']`."""
        return BothCaches(*(own.refilled(slots, other) for own, other in zip(self, new, strict=True)))

    def empty(self, rows: int, length: int, room: Room) -> BothCaches:
        """Caches like these for `rows` prompts with one completion each."""
        return BothCaches(*(own.empty(rows, length, room) for own in self))

    def with_texts(self, earlier: BothCaches, texts: CachedTexts) -> BothCaches:
        """Set prompts to texts (prompt and completion) of an earlier cache."""
        return BothCaches(*(own.with_texts(other, texts) for own, other in zip(self, earlier, strict=True)))

    def extended(self, new: BothKept, lengths: jax.Array, more: jax.Array) -> BothCaches:
        """Append the first `more` `[P]` tokens of `new` `[P, T]` to prompts with one completion each."""
        return BothCaches(*(own.extended(each, lengths, more) for own, each in zip(self, new, strict=True)))


Kept = KeysValues | Latents | ConvolutionInputs | RecurrentState | NothingKept | BothKept
LayersCache = LayerCache | LatentCache | ConvolutionCache | RecurrentCache | NothingKept | BothCaches


class Cache(NamedTuple):
    """The cache of a model, for P prompts and their P x G completions.

    parts: one per group of layers of a run that have the same window, with a leading axis L; or one per layer.
    fill: how much of the parts is filled.
    """

    parts: list[LayersCache]
    fill: CacheFill

    def appended(self, new: list[Kept], *, after: jax.Array, alive: jax.Array | None = None) -> Cache:
        """Add a token to every completion, `new` part by part.

        Args:
            alive: bool `[P x G]`; the tokens of all other completions stay as they are, for `CachedTexts`. None: they
                may be overwritten.
            after: non-negative ids that were sampled using the whole cache. The write position is made to depend on
                them: otherwise XLA sees no order between the reads and writes of a step, and copies the whole cache.
        """
        place = jnp.minimum(self.fill.written, self.fill.written + jnp.maximum(jnp.max(after), 0))
        parts = [own.appended(each, place, alive) for own, each in zip(self.parts, new, strict=True)]
        return Cache(parts, self.fill._replace(written=self.fill.written + 1))

    def grown(self, more: int, grow: Grow) -> Cache:
        """Increase the capacity for completions; `grow` resizes one array, e.g. `grown_ring`. No completion may be
        longer than the current capacity."""
        return self._replace(parts=[own.grown(more, self.fill.written, grow) for own in self.parts])

    def with_prompt_capacity(self, count: int) -> Cache:
        """Resize to `count` tokens per prompt."""
        return self._replace(parts=[own.with_prompt_capacity(count) for own in self.parts])

    def extended(self, new: list[Kept], more: jax.Array) -> Cache:
        """Append the first `more` `[P]` tokens of `new` `[P, T]` to the prompts, which have no completions yet."""
        lengths = self.fill.prompt_lengths
        parts = [own.extended(each, lengths, more) for own, each in zip(self.parts, new, strict=True)]
        return Cache(parts, self.fill._replace(prompt_lengths=lengths + more))

    def refilled(self, slots: jax.Array, new: Cache) -> Cache:
        """Replace the prompts at `slots` by the prompts of `new` `[P']`, which must fit; their completions start empty.
        Prompts whose slot is out of range are dropped."""
        parts = [own.refilled(slots, other) for own, other in zip(self.parts, new.parts, strict=True)]
        lengths, begun, written, offsets = self.fill
        lengths = lengths.at[slots].set(new.fill.prompt_lengths, mode="drop")
        if offsets is not None:
            offsets = offsets.at[slots].set(new.fill.offsets, mode="drop")
        return Cache(parts, CacheFill(lengths, begun.at[slots].set(written, mode="drop"), written, offsets))


# The fill state, and helpers for resizing


class CacheFill(NamedTuple):
    """How much of a cache is filled, the same for all layers. The token being computed comes next.

    prompt_lengths: int32 `[P]`.
    begun: int32 `[P]`, the value of `written` when the completions of a prompt began: 0, unless the prompt replaced
        another one.
    written: int32 scalar, number of tokens written so far; completions own the tokens since `begun`.
    offsets: int32 `[P]`, the position of the token after each prompt, minus the prompt's length: the tokens of an image
        share positions. None if positions just count tokens.
    """

    prompt_lengths: jax.Array
    begun: jax.Array
    written: jax.Array
    offsets: jax.Array | None = None

    def selected(self, prompts: jax.Array) -> CacheFill:
        """The fill state of these prompts, int32 `[P']`."""
        offsets = None if self.offsets is None else self.offsets[prompts]
        return CacheFill(self.prompt_lengths[prompts], self.begun[prompts], self.written, offsets)

    @property
    def own(self) -> jax.Array:
        """Number of completion tokens in the cache for each prompt, int32 `[P]`."""
        return self.written - self.begun

    @property
    def next_positions(self) -> jax.Array:
        """The position of the next token of each prompt's completions, int32 `[P]`."""
        counted = self.prompt_lengths + self.own
        return counted if self.offsets is None else counted + self.offsets

    def tokens_back(self, capacity: int) -> jax.Array:
        """How many tokens ago each of `capacity` places was written, int32 `[T]`: 1 for the last token."""
        return (self.written - 1 - jnp.arange(capacity)) % capacity + 1

    def of_completions(self, capacity: int) -> jax.Array:
        """The position in its text (prompt included) of the token at each of `capacity` places, int32 `[P, T]`;
        arbitrary for empty places."""
        return jnp.maximum(self.own[:, None] - self.tokens_back(capacity), 0) + self.prompt_lengths[:, None]


class CachedTexts(NamedTuple):
    """For each prompt of a new cache, the text of another cache (a prompt and one of its completions) that it becomes;
    arrays `[R]`. The new cache has one completion per prompt.

    prompts, members: int32, the prompt, and the completion among the prompt's completions. All completions began
        together.
    prompt_lengths, lengths: int32, number of tokens of the prompt, and of the text.
    here: bool, whether the other cache has the text; the numbers are arbitrary if not.
    """

    prompts: jax.Array
    members: jax.Array
    prompt_lengths: jax.Array
    lengths: jax.Array
    here: jax.Array

    def joined(self, target: jax.Array, prompts: jax.Array, completions: jax.Array) -> jax.Array:
        """Set rows of `target` `[..., R, K, S', C]` to texts of `prompts` `[..., P, K, S, C]` and `completions`
        `[..., P, G, K, T, C]`; of longer texts, the last S' tokens. All rows are computed, because XLA needs no copy of
        `target` then."""
        count, capacity, layers = prompts.shape[-2], completions.shape[-2], (slice(None),) * (prompts.ndim - 4)
        place, ends = of_prompts(self.lengths, target.shape[-2]), self.prompt_lengths[:, None]
        prompt = _tokens(prompts[*layers, self.prompts], place - jnp.maximum(ends - count, 0))
        own = _tokens(completions[*layers, self.prompts, self.members], (place - ends) % capacity)
        text = jnp.where((place < ends)[:, None, :, None], prompt, own)
        return jnp.where(self.here[:, None, None, None], text, target)

    def of_completions(self, target: jax.Array, completions: jax.Array, layers: int) -> jax.Array:
        """Set rows of `target` `[..., R, 1, ...]` to what `completions` `[..., P, G, ...]` have, after `layers`
        axes."""
        own = completions[*(slice(None),) * layers, self.prompts, self.members]
        return _where(self.here, jnp.expand_dims(own, layers + 1), target, layers)


class Room(NamedTuple):
    """The size of a new cache: `capacity` places for each of `group` completions per prompt. Layers with a `window`
    keep at most that many tokens of prompts and of completions; None for no limit."""

    group: int
    capacity: int
    window: int | None = None

    @property
    def per_completion(self) -> int:
        """Tokens per completion."""
        return within(self.window, self.capacity)


def within(window: int | None, count: int) -> int:
    """The smaller of `count` and the window."""
    return count if window is None else min(window, count)


def zeros_by_head(shape: Sequence[int], heads: int, dtype: jnp.dtype) -> jax.Array:
    """Zeros with an axis of heads that is sharded over `tensor` like the heads of the layers."""
    zeros, devices = jnp.zeros(shape, dtype), jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)
    if devices == 1 or shape[heads] % devices:
        return zeros
    axes = [None] * len(shape)
    axes[heads] = TENSOR
    return jax.lax.with_sharding_constraint(zeros, PartitionSpec(*axes))


def of_prompts(lengths: jax.Array, count: int) -> jax.Array:
    """The position in its prompt of the token at each of `count` places, int32 `[P, S]`: from 0 on, or for longer
    prompts the positions of the last tokens."""
    return jnp.maximum(lengths - count, 0)[:, None] + jnp.arange(count)


def replaced(array: jax.Array, slots: jax.Array, new: jax.Array, axis: int) -> jax.Array:
    """Set `new` at these indices of an axis; indices out of range are dropped."""
    return array.at[(slice(None),) * axis + (slots,)].set(new.astype(array.dtype), mode="drop")


def sized(array: jax.Array, axis: int, size: int) -> jax.Array:
    """Resize an axis to `size`, by slicing or zero-padding."""
    there = array.shape[axis]
    return jax.lax.slice_in_dim(array, 0, size, axis=axis) if size < there else wider(array, axis, size - there)


# (array, axis of its prompts, whether the next axis counts completions) -> the selected prompts or completions
Select = Callable[[jax.Array, int, bool], jax.Array]
Grow = Callable[[jax.Array, jax.Array, int, int], jax.Array]  # `grown_ring`, or one that also frees the old array


def grown_ring(array: jax.Array, written: jax.Array, axis: int, size: int) -> jax.Array:
    """Grow a ring buffer of n places to `size` >= n: the token written at step s moves from place s % n to s % size.

    Places without a token of the last n steps get copies of others.

    Args:
        written: int32 scalar, number of steps so far.
    """
    old = array.shape[axis]
    if size == old:
        return array
    if size % old == 0:  # s % size % old == s % old
        return jnp.concatenate([array] * (size // old), axis=axis)
    last = written - 1 - (written - 1 - jnp.arange(size)) % size  # the step that wrote to each place last
    return jnp.take(array, last % old, axis=axis)


def wider(array: jax.Array, axis: int, more: int) -> jax.Array:
    """Zero-pad an axis by `more`."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, more)
    return jnp.pad(array, widths)
