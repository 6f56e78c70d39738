"""Several steps of decoding in one call of a compiled program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.generation.decode import Decoding, Stops, with_token
from trl_jax.generation.history import History
from trl_jax.generation.noise import Noise, sample
from trl_jax.generation.processors import Processor, process
from trl_jax.generation.shards import Shards, anywhere, of_all, on_each
from trl_jax.generation.weights import trunk_of, with_head_in
from trl_jax.models.cached_decoder import with_keys
from trl_jax.models.functional import merge
from trl_jax.nn.cache.cache import Kept


class Drawing(NamedTuple):
    """How a token is drawn, and the prompts of all rows as processors see them.

    processors: changes of the scores, in their order. prompt_ids: int32 `[B, W]`, padded on the left; from
    `prompt_length` on, an int32 scalar, columns only fill the shape. pads: int32 `[B]`, columns on the left that are
    padding. temperature: what logits are divided by for their log-probabilities.
    """

    processors: tuple[Processor, ...]
    prompt_ids: jax.Array
    prompt_length: jax.Array
    pads: jax.Array
    temperature: jax.Array

    @classmethod
    def places(cls, shards: Shards) -> Drawing:
        """How it is divided."""
        return cls(shards.whole, shards.rows, shards.whole, shards.rows, shards.whole)

    def history(self, state: Decoding) -> History:
        room = jnp.pad(self.prompt_ids, ((0, 0), (0, state.capacity)))
        ids = jax.lax.dynamic_update_slice(room, state.in_order(), (0, self.prompt_length))
        return History(ids, self.prompt_length + state.drawn, self.prompt_length, self.pads)


class Status(NamedTuple):
    """Copies of `Decoding` for the host to look at, of all rows on each device, while the state itself is given to the
    next call."""

    count: jax.Array
    alive: jax.Array

    @classmethod
    def of(cls, state: Decoding, shards: Shards | None) -> Status:
        return cls(state.count, of_all(shards, state.alive))


def _drawn(logits, state: Decoding, noise: Noise | None, step, drawing: Drawing):
    """Ids `[B]` drawn by `logits` `[B, V]`, and their log-probabilities where they are kept."""
    scores = process(drawing.processors, drawing.history(state), logits) if drawing.processors else logits
    ids = jnp.argmax(scores, axis=-1) if noise is None else sample(scores, noise.exponentials(step, logits.shape[1]))
    ids = ids.astype(jnp.int32)
    if state.logps is None:
        return ids, None
    scaled = logits / drawing.temperature
    at = jnp.take_along_axis(scaled, jnp.maximum(ids, 0)[:, None], axis=1)[:, 0]
    return ids, at - jax.nn.logsumexp(scaled, axis=1)


@partial(jax.jit, static_argnames=("shards",), donate_argnames=("state",))
def first_tokens(
    logits: jax.Array,
    state: Decoding,
    stops: Stops,
    noise: Noise | None,
    drawing: Drawing,
    *,
    shards: Shards | None = None,
) -> tuple[Decoding, Status]:
    """The first token of each completion, by its prompt's logits `[P, V]`."""

    def of_shard(logits, state, stops, noise, drawing):
        logits = jnp.repeat(logits, len(state.alive) // len(logits), axis=0)
        state = with_token(state, *_drawn(logits, state, noise, 0, drawing), stops)
        return state, Status.of(state, shards)

    def places(own: Shards) -> tuple:
        given = own.rows, Decoding.places(own), own.whole, *_drawn_by(own, noise)
        return given, (Decoding.places(own), own.whole)

    return on_each(shards, of_shard, places)(logits, state, stops, noise, drawing)


def _drawn_by(shards: Shards, noise: Noise | None) -> tuple:
    """How noise and `Drawing` are divided."""
    return None if noise is None else noise.places(shards), Drawing.places(shards)


@partial(jax.jit, static_argnames=("graph", "dtype", "head_dtype", "max_tokens", "shards"), donate_argnames=("state",))
def next_tokens(
    graph: Any,
    arrays: dict[str, jax.Array],
    layers: list[nnx.State] | None,
    state: Decoding,
    stops: Stops,
    noise: Noise | None,
    drawing: Drawing,
    first: jax.Array,
    steps: jax.Array,
    longest: jax.Array,
    *,
    dtype: jnp.dtype,
    head_dtype: jnp.dtype,
    max_tokens: int,
    shards: Shards | None = None,
) -> tuple[Decoding, Status]:
    """At most `steps` more tokens of each completion, fewer where all end before.

    Args:
        layers: as in `models.cached_decoder.with_keys`.
        longest: int32 scalar, tokens of the longest text of the call with the first of these.
        noise: random numbers, from its step `first` on for these steps; None takes the likeliest ids.
        max_tokens: no prompt with its completion will have more.
    """
    steps_of = _Steps(graph, dtype, head_dtype, max_tokens, shards)

    def places(own: Shards) -> tuple:
        given = own.params, own.whole, Decoding.places(own), own.whole, *_drawn_by(own, noise), *[own.whole] * 3
        return given, (Decoding.places(own), own.whole)

    of_shard = on_each(shards, steps_of, places, parameters=True)
    return of_shard(arrays, layers, state, stops, noise, drawing, first, steps, longest)


@dataclass(frozen=True)
class _Steps:
    """`next_tokens` of a shard."""

    graph: Any
    dtype: jnp.dtype
    head_dtype: jnp.dtype
    max_tokens: int
    shards: Shards | None

    def __call__(self, arrays, layers, state, stops, noise, drawing, first, steps, longest):
        trunk, headed = trunk_of(merge(self.graph, arrays)), with_head_in(self.graph, arrays, self.head_dtype)
        options = {"layers": layers, "dtype": self.dtype, "max_tokens": self.max_tokens}

        def angles(state: Decoding, number: jax.Array) -> dict[str, jax.Array]:
            return trunk.angles(_positions(state), longest + number)

        def forward(state: Decoding, number: jax.Array, turned: dict[str, jax.Array]) -> tuple[jax.Array, list[Kept]]:
            tokens = jax.lax.dynamic_slice_in_dim(state.tokens, (state.count - 1) % state.capacity, 1, axis=1)
            beside = options | {"cache": state.cache, "angles": turned}
            hidden, new = with_keys(trunk, tokens, _positions(state), None, longest + number, **beside)
            logits = headed.outputs(hidden.astype(self.dtype), None, self.head_dtype, None, 1.0)
            return logits.astype(jnp.float32), new

        def step(carry):
            number, state, turned, _ = carry
            logits, new = forward(state, number, turned)
            ids, logps = _drawn(logits, state, noise, first + number, drawing)
            state = with_token(state._replace(cache=state.cache.appended(new, after=ids)), ids, logps, stops)
            # The angles come from the step before: in one step XLA would compute them again in each layer, for each
            # head.
            return number + 1, state, angles(state, number + 1), self._lives(state)

        def goes_on(carry):
            number, _, _, lives = carry
            return (number < steps) & lives

        begin = jnp.int32(0), state, angles(state, jnp.int32(0)), self._lives(state)
        state = jax.lax.while_loop(goes_on, step, begin)[1]
        return state, Status.of(state, self.shards)

    def _lives(self, state: Decoding) -> jax.Array:
        """Whether any completion goes on; all shards take as many steps, as they send to each other in each."""
        return anywhere(self.shards, jnp.any(state.alive))


def _positions(state: Decoding) -> jax.Array:
    """Those of the tokens that come next, int32 `[B, 1]`."""
    positions_P = state.cache.places.prompt_lengths + state.cache.places.own
    return jnp.repeat(positions_P, len(state.alive) // len(positions_P))[:, None]
