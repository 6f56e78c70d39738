"""Completions grow by a token a step, several steps in one call: forward, draw, write, until all have ended."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trl_jax.nn.kv_cache import Cache


class Stops(NamedTuple):
    """Where completions end, and what stands behind their end.

    eos: int32 `[number]`, ids that end one; -1 is none. pad: int32 scalar. max_new: int32 scalar, tokens at most.
    """

    eos: jax.Array
    pad: jax.Array
    max_new: jax.Array


class Decoding(NamedTuple):
    """The state between two steps, of B = P x G completions.

    cache: holds all tokens but each completion's last. tokens: int32 `[B, T]`. count: int32 scalar, steps so far.
    lengths: int32 `[B]`, tokens of each, that which ended it among them. alive: bool `[B]`. logps: float32 `[B, T]`,
    the log-probability of each token; None where nobody asks.
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


def begun(cache: Cache, rows: int, capacity: int, *, logps: bool) -> Decoding:
    """The state before the first token."""
    tokens = jnp.zeros((rows, capacity), jnp.int32)
    kept = jnp.zeros(tokens.shape, jnp.float32) if logps else None
    return Decoding(cache, tokens, jnp.int32(0), jnp.zeros(rows, jnp.int32), jnp.ones(rows, bool), kept)


@partial(jax.jit, static_argnames=("capacity",))
def grown(state: Decoding, *, capacity: int) -> Decoding:
    """With room for more tokens."""
    more = capacity - state.capacity
    widths = ((0, 0), (0, more))
    logps = None if state.logps is None else jnp.pad(state.logps, widths)
    return state._replace(cache=state.cache.grown(more), tokens=jnp.pad(state.tokens, widths), logps=logps)


@jax.jit
def selected(state: Decoding, prompts: jax.Array, members: jax.Array, alive: jax.Array) -> Decoding:
    """Some of the completions: those at `members` `[P', G']` of the prompts at `prompts` `[P']`, where `alive` says so.

    Args:
        members: int32, a completion's number among those of its prompt.
    """
    rows = (prompts[:, None] * _group(state) + members).reshape(-1)
    logps = None if state.logps is None else state.logps[rows]
    own = {"tokens": state.tokens[rows], "lengths": state.lengths[rows], "alive": alive.reshape(-1), "logps": logps}
    return state._replace(cache=state.cache.selected(prompts, members), **own)


def _group(state: Decoding) -> int:
    """Completions of a prompt."""
    return len(state.tokens) // len(state.cache.places.prompt_lengths)


def with_token(state: Decoding, drawn: jax.Array, logps: jax.Array | None, stops: Stops) -> Decoding:
    """With the next token of each completion that lives, one of `drawn` `[B]`; others get pads."""
    tokens = jnp.where(state.alive, drawn, stops.pad).astype(jnp.int32)
    at = (0, state.count)
    kept = state.logps
    if kept is not None:
        kept = jax.lax.dynamic_update_slice(kept, jnp.where(state.alive, logps, 0)[:, None], at)
    ended = jnp.any(tokens[:, None] == stops.eos, axis=1) | (state.count + 1 >= stops.max_new)
    return state._replace(
        tokens=jax.lax.dynamic_update_slice(state.tokens, tokens[:, None], at),
        count=state.count + 1,
        lengths=state.lengths + state.alive,
        alive=state.alive & ~ended,
        logps=kept,
    )
