"""The inputs of a short convolution, or a state, of layers that do not attend."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trl_jax.nn.cache.places import Room, replaced


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
