"""Completions grow by a token a step, several steps in one call: forward, draw, write, until all have ended."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.generation.shards import Shards, on_each
from trl_jax.nn.cache.cache import Cache


class Stops(NamedTuple):
    """Where completions end, and what stands behind their end.

    eos: int32 `[number]`, ids that end one; -1 is none. pad: int32 scalar. max_new: int32 scalar, tokens at most.
    """

    eos: jax.Array
    pad: jax.Array
    max_new: jax.Array


class Decoding(NamedTuple):
    """The state between two steps, of B = P x G completions.

    cache: holds all tokens but each completion's last. tokens: int32 `[B, T]`, that of step s at s % T. count: int32
    scalar, steps so far. lengths: int32 `[B]`, tokens of each, that which ended it among them. alive: bool `[B]`.
    logps: float32 `[B, T]`, the log-probability of each token; None where nobody asks.
    """

    cache: Cache
    tokens: jax.Array
    count: jax.Array
    lengths: jax.Array
    alive: jax.Array
    logps: jax.Array | None

    @property
    def capacity(self) -> int:
        return self.tokens.shape[1]

    @property
    def begun(self) -> jax.Array:
        """The step at which each completion began, int32 `[B]`."""
        begun_P = self.cache.places.begun
        return jnp.repeat(begun_P, len(self.alive) // len(begun_P))

    @property
    def drawn(self) -> jax.Array:
        """Tokens that were drawn for each completion, int32 `[B]`, those behind its end among them."""
        return self.count - self.begun

    @classmethod
    def places(cls, shards: Shards) -> Decoding:
        """How it is divided."""
        rows, whole = shards.rows, shards.whole
        return cls(shards.cache, rows, whole, rows, rows, rows)

    def in_order(self) -> jax.Array:
        """The tokens, int32 `[B, T]`, with each completion's first one at place 0."""
        at = (self.begun[:, None] + jnp.arange(self.capacity)) % self.capacity
        return jnp.take_along_axis(self.tokens, at, axis=1)


def begun(cache: Cache, alive: np.ndarray, capacity: int, *, logps: bool) -> Decoding:
    """The state before the first token, of completions of which some, bool `[B]`, only fill the shape."""
    tokens = np.zeros((len(alive), capacity), np.int32)
    kept = np.zeros(tokens.shape, np.float32) if logps else None
    return Decoding(cache, tokens, np.int32(0), np.zeros(len(alive), np.int32), alive, kept)


@partial(jax.jit, static_argnames=("capacity",))
def grown(state: Decoding, *, capacity: int) -> Decoding:
    """With room for more tokens."""
    more = capacity - state.capacity
    widths = ((0, 0), (0, more))
    logps = None if state.logps is None else jnp.pad(state.logps, widths)
    return state._replace(cache=state.cache.grown(more), tokens=jnp.pad(state.tokens, widths), logps=logps)


@partial(jax.jit, static_argnames=("shards",))
def selected(
    state: Decoding, prompts: jax.Array, members: jax.Array, alive: jax.Array, *, shards: Shards | None = None
) -> Decoding:
    """Some of the completions: those at `members` `[P', G']` of the prompts at `prompts` `[P']`, where `alive` says so.

    Args:
        prompts: int32, counted within a shard, each of which has as many. members: int32, a completion's number among
            those of its prompt.
    """

    def of_shard(state: Decoding, prompts: jax.Array, members: jax.Array, alive: jax.Array) -> Decoding:
        rows = (prompts[:, None] * _group(state) + members).reshape(-1)
        logps = None if state.logps is None else state.logps[rows]
        own = {"tokens": state.tokens[rows], "lengths": state.lengths[rows], "alive": alive.reshape(-1), "logps": logps}
        return state._replace(cache=state.cache.selected(prompts, members), **own)

    def places(own: Shards) -> tuple:
        return (Decoding.places(own), *[own.rows] * 3), Decoding.places(own)

    return on_each(shards, of_shard, places)(state, prompts, members, alive)


@partial(jax.jit, static_argnames=("count",))
def with_prompt_places(state: Decoding, *, count: int) -> Decoding:
    """With so many places for each prompt."""
    return state._replace(cache=state.cache.with_prompt_places(count))


@partial(jax.jit, static_argnames=("shards",), donate_argnames=("state",))
def refilled(state: Decoding, slots: jax.Array, fresh: Decoding, *, shards: Shards | None = None) -> Decoding:
    """With other prompts, of which `fresh` has the first token, in the place of those at `slots`, int32 `[P']`, counted
    within a shard; a slot that is not there leaves the fresh prompt out."""

    def places(own: Shards) -> tuple:
        return (Decoding.places(own), own.rows, Decoding.places(own)), Decoding.places(own)

    return on_each(shards, _refilled, places)(state, slots, fresh)


def _refilled(state: Decoding, slots: jax.Array, fresh: Decoding) -> Decoding:
    rows = (slots[:, None] * _group(state) + jnp.arange(_group(state))).reshape(-1)
    place = (state.count - 1) % state.capacity

    def with_first(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[rows, place].set(new[:, 0], mode="drop")

    return state._replace(
        cache=state.cache.refilled(slots, fresh.cache),
        tokens=with_first(state.tokens, fresh.tokens),
        lengths=state.lengths.at[rows].set(fresh.lengths, mode="drop"),
        alive=state.alive.at[rows].set(fresh.alive, mode="drop"),
        logps=None if state.logps is None else with_first(state.logps, fresh.logps),
    )


def _group(state: Decoding) -> int:
    """Completions of a prompt."""
    return len(state.tokens) // len(state.cache.places.prompt_lengths)


def with_token(state: Decoding, drawn: jax.Array, logps: jax.Array | None, stops: Stops) -> Decoding:
    """With the next token of each completion that lives, one of `drawn` `[B]`; others get pads, or where there is no
    place without a token of theirs keep that."""
    place = state.count % state.capacity
    full = state.drawn >= state.capacity

    def filled(there: jax.Array, new: jax.Array, pad: jax.Array | int) -> jax.Array:
        other = jnp.where(full, there[:, place], pad)
        return there.at[:, place].set(jnp.where(state.alive, new, other).astype(there.dtype))

    kept = None if state.logps is None else filled(state.logps, logps, 0)
    ended = jnp.any(drawn[:, None] == stops.eos, axis=1) | (state.drawn + 1 >= stops.max_new)
    return state._replace(
        tokens=filled(state.tokens, drawn, stops.pad),
        count=state.count + 1,
        lengths=state.lengths + state.alive,
        alive=state.alive & ~ended,
        logps=kept,
    )
