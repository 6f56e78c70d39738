"""The compiled programs of generation: prefill, decoding steps, and updates of the decoding state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from trl_jax.core.outputs import reads_of_rows
from trl_jax.data.images import TEXT_ALONE, PromptImages
from trl_jax.generation.noise import Noise, sample
from trl_jax.generation.sampling import History, Processor, process
from trl_jax.generation.weights import (
    Shards,
    Weights,
    all_gather_rows,
    any_shard,
    shard_mapped,
    trunk_of,
    unstacked,
)
from trl_jax.models.arch import Arch, cache_parts
from trl_jax.models.cached_decoder import with_keys
from trl_jax.models.decoder import Features
from trl_jax.models.model import merge
from trl_jax.nn.cache import Cache, CacheFill, CacheSize, NewEntries, each_entry, grown_ring

# Prefill


@partial(jax.jit, static_argnames=("group", "capacity", "max_tokens"))
def prefill(
    weights: Weights,
    tokens: jax.Array,
    lengths: jax.Array,
    longest: jax.Array,
    images: PromptImages = TEXT_ALONE,
    *,
    group: int,
    capacity: int,
    max_tokens: int,
) -> tuple[jax.Array, Cache]:
    """Run the prompts through the model.

    Args:
        tokens: int32 `[P, S]`, right-padded prompts.
        lengths: int32 `[P]`, prompt lengths, at least 1.
        longest: int32 scalar, tokens of the longest text in the call.
        images: of the prompts.
        group: completions per prompt.
        capacity: cache capacity per completion, in tokens.
        max_tokens: upper bound on prompt + completion; attention windows of at least this size are ignored.

    Returns:
        float32 logits `[P, V]` of the token after each prompt, and the cache for `group` completions of each.
    """

    def of_shard(arrays, tokens, lengths, longest, images):
        model = merge(weights.graph, arrays)
        features = None if images.images is None else model.features(images.images, dtype=weights.dtype)
        options = {"positions": images.positions, "features": features}
        hidden, new = _run_texts(model, weights, tokens, lengths, longest, max_tokens, **options)
        fill = CacheFill(lengths, jnp.zeros_like(lengths), jnp.int32(0), images.offsets)
        parts = _parts(weights, new, lambda entry, size: entry.cache(lengths, size), group, capacity)
        return weights.logits(model, hidden), Cache(parts, fill)

    def specs(shards: Shards) -> tuple:
        return (shards.params, shards.rows, shards.rows, shards.whole, shards.rows), (shards.rows, shards.cache)

    run = shard_mapped(weights.shards, of_shard, specs, parameters=True)
    return run(weights.arrays, tokens, lengths, longest, images)


def _run_texts(
    model: nnx.Module,
    weights: Weights,
    tokens: jax.Array,
    lengths: jax.Array,
    longest: jax.Array,
    max_tokens: int,
    *,
    positions: jax.Array | None = None,
    features: Features | None = None,
) -> tuple[jax.Array, list[NewEntries]]:
    """Run right-padded texts through the decoder.

    Args:
        positions: int32 `[R, T, A]`; None to count the tokens.
        features: of the texts' images.

    Returns:
        The hidden state of the last token of each text, and the new entries for the cache.
    """
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    reads = reads_of_rows(lengths - 1, tokens.shape[1])
    options = {"dtype": weights.dtype, "max_tokens": max_tokens, "features": features}
    return with_keys(trunk_of(model), tokens, positions, reads, longest, **options)


def _parts(weights: Weights, new: list[NewEntries], cached: Callable, group: int, capacity: int) -> list[Any]:
    """The parts of a new cache, layer by layer if the weights are.

    Args:
        cached: `(entry, size)` -> the cache of the new tokens or state of one entry.
    """
    arch, parts = weights.arch, []
    for entries, (_, window) in zip(new, cache_parts(arch), strict=True):
        size = CacheSize(group, capacity, window)
        parts.append(each_entry(partial(cached, size=size), entries))
    return parts if weights.layers is None else _by_layer(parts, arch)


def _by_layer(parts: list[Any], arch: Arch) -> list[Any]:
    """Split cache parts that cover several layers (models/arch.py) into one part per layer that has a cache."""
    part_of = {}
    for part, (layers, _) in zip(parts, cache_parts(arch), strict=True):
        part_of |= zip(layers, unstacked(part, len(layers)), strict=True)
    return [part_of[layer] for layer in sorted(part_of)]


def full_cache(
    weights: Weights, prompts: tuple[int, int], group: int, capacities: tuple[int, int], max_tokens: int
) -> Cache:
    """The shapes of the cache of one device after it has grown.

    Args:
        weights: may be shapes.
        prompts: their number, and their padded length.
        group: completions per prompt.
        capacities: after `prefill` and after `grow`.
        max_tokens: see `prefill`.
    """
    tokens, lengths, longest = (jax.ShapeDtypeStruct(shape, np.int32) for shape in (prompts, prompts[:1], ()))
    first, last = capacities
    sizes = {"group": group, "capacity": first, "max_tokens": max_tokens}
    _, cache = prefill.eval_shape(replace(weights, shards=None), tokens, lengths, longest, **sizes)
    state = initial_state(cache, np.ones(prompts[0] * group, bool), first, logps=False)
    return grown_shapes(state, capacity=last).cache


@partial(jax.jit, static_argnames=("max_tokens",), donate_argnames=("state",))
def recomputed(weights: Weights, state: Decoding, texts: jax.Array, longest: jax.Array, *, max_tokens: int) -> Decoding:
    """Recompute the cache for a longest text of `longest` tokens: LongRoPE changes the rotation of all tokens once a
    text exceeds a certain length.

    Args:
        texts: int32 `[B, S + T]`, each prompt followed by its completion so far, right-padded.
    """

    def of_shard(arrays, state, texts, longest):
        fill = state.cache.fill
        group = len(texts) // len(fill.prompt_lengths)
        lengths = jnp.maximum(jnp.repeat(fill.prompt_lengths + fill.completion_lengths, group), 1)
        _, new = _run_texts(merge(weights.graph, arrays), weights, texts, lengths, longest, max_tokens)
        parts = _parts(weights, new, lambda entry, size: entry.cache_of_texts(fill, size), group, state.capacity)
        return state._replace(cache=Cache(parts, fill))

    def specs(shards: Shards) -> tuple:
        return (shards.params, Decoding.specs(shards), shards.rows, shards.whole), Decoding.specs(shards)

    run = shard_mapped(weights.shards, of_shard, specs, parameters=True)
    return run(weights.arrays, state, texts, longest)


# Decoding state


class Stops(NamedTuple):
    """Stopping criteria.

    eos: int32 `[n]`, ids that end a completion; -1 matches none.
    pad: int32 scalar, id that fills the rest of a row.
    max_new: int32 scalar, maximum number of tokens.
    """

    eos: jax.Array
    pad: jax.Array
    max_new: jax.Array


class Decoding(NamedTuple):
    """The state between two steps, for B = P x G completions.

    cache: keys and values of all tokens except the last of each completion.
    tokens: int32 `[B, T]`, a ring buffer: the token of step s is at s % T.
    count: int32 scalar, steps so far.
    lengths: int32 `[B]`, tokens of each completion, including its end token.
    alive: bool `[B]`, whether the completion continues.
    logps: float32 `[B, T]`, log-probability of each token; None if not requested.
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
        """The step at which each completion started, int32 `[B]`."""
        begun_P = self.cache.fill.begun
        return jnp.repeat(begun_P, len(self.alive) // len(begun_P))

    @property
    def drawn(self) -> jax.Array:
        """Number of steps taken for each completion, int32 `[B]`, including those after its end."""
        return self.count - self.begun

    @classmethod
    def specs(cls, shards: Shards) -> Decoding:
        """Partition specs."""
        rows, whole = shards.rows, shards.whole
        return cls(shards.cache, rows, whole, rows, rows, rows)

    def in_order(self) -> jax.Array:
        """The tokens, int32 `[B, T]`, with the first token of each completion in column 0."""
        at = (self.begun[:, None] + jnp.arange(self.capacity)) % self.capacity
        return jnp.take_along_axis(self.tokens, at, axis=1)


def initial_state(cache: Cache, alive: np.ndarray, capacity: int, *, logps: bool) -> Decoding:
    """The state before the first token. `alive`, bool `[B]`, is False for padding rows."""
    tokens = np.zeros((len(alive), capacity), np.int32)
    recorded = np.zeros(tokens.shape, np.float32) if logps else None
    return Decoding(cache, tokens, np.int32(0), np.zeros(len(alive), np.int32), alive, recorded)


def grow(state: Decoding, *, capacity: int) -> Decoding:
    """Grow the state to a larger capacity; consumes the old state. Each array is freed before the next one is copied,
    so two caches are never alive at once."""
    cache = state.cache.grown(capacity - state.capacity, _grow_and_free)
    logps = None if state.logps is None else _grow_and_free(state.logps, state.count, 1, capacity)
    return state._replace(cache=cache, tokens=_grow_and_free(state.tokens, state.count, 1, capacity), logps=logps)


def _grow_and_free(array: jax.Array, written: jax.Array, axis: int, size: int) -> jax.Array:
    if size == array.shape[axis]:
        return array
    new = _grown_ring(array, written, axis, size)
    array.delete()
    return new


_grown_ring = jax.jit(grown_ring, static_argnums=(2, 3))


def grown_shapes(state: Decoding, *, capacity: int) -> Decoding:
    """The shapes of `grow`, for a state of shapes."""

    def grow_state(state: Decoding) -> Decoding:
        rings = {"tokens": state.tokens} | ({} if state.logps is None else {"logps": state.logps})
        rings = {name: grown_ring(ring, state.count, 1, capacity) for name, ring in rings.items()}
        return state._replace(cache=state.cache.grown(capacity - state.capacity, grown_ring), **rings)

    return jax.eval_shape(grow_state, state)


def selected(
    state: Decoding, prompts: np.ndarray, completions: np.ndarray, alive: np.ndarray, *, shards: Shards | None = None,
    keep: bool = False,
) -> Decoding:  # fmt: skip
    """Select a subset of completions. Consumes the cache of `state`, array by array like `grow`, unless `keep` is set.

    Args:
        prompts: int32 `[P']`, prompt indices within the shard; every shard has equally many.
        completions: int32 `[P', G']`, indices of completions within their prompt.
        alive: bool `[P', G']`, False for padding.
    """

    def select(array: jax.Array, axis: int, per_completion: bool) -> jax.Array:
        new = _selected_array(array, prompts, completions if per_completion else None, axis=axis, shards=shards)
        if not keep:
            array.delete()
        return new

    parts = state.cache.selected(select).parts
    bare = state._replace(cache=state.cache._replace(parts=[]))
    bare = _selected_rows(bare, prompts, completions, alive, shards=shards)
    return bare._replace(cache=bare.cache._replace(parts=parts))


@partial(jax.jit, static_argnames=("axis", "shards"))
def _selected_array(
    array: jax.Array, prompts: jax.Array, completions: jax.Array | None, *, axis: int, shards: Shards | None
) -> jax.Array:
    """`array[prompts]` or `array[prompts, completions]`, where prompts are on this axis."""

    def of_shard(array: jax.Array, prompts: jax.Array, completions: jax.Array | None) -> jax.Array:
        at = (prompts,) if completions is None else (prompts[:, None], completions)
        return array[(slice(None),) * axis + at]

    def specs(shards: Shards) -> tuple:
        of_array = PartitionSpec(*[None] * axis, shards.axes)
        return (of_array, shards.rows, shards.rows), of_array

    return shard_mapped(shards, of_shard, specs)(array, prompts, completions)


@partial(jax.jit, static_argnames=("shards",))
def _selected_rows(
    state: Decoding, prompts: jax.Array, completions: jax.Array, alive: jax.Array, *, shards: Shards | None
) -> Decoding:
    """`selected` for a state without the parts of its cache."""

    def of_shard(state: Decoding, prompts: jax.Array, completions: jax.Array, alive: jax.Array) -> Decoding:
        rows = (prompts[:, None] * _group(state) + completions).reshape(-1)
        return state._replace(
            cache=state.cache._replace(fill=state.cache.fill.selected(prompts)),
            tokens=state.tokens[rows],
            lengths=state.lengths[rows],
            alive=alive.reshape(-1),
            logps=None if state.logps is None else state.logps[rows],
        )

    def specs(shards: Shards) -> tuple:
        return (Decoding.specs(shards), *[shards.rows] * 3), Decoding.specs(shards)

    return shard_mapped(shards, of_shard, specs)(state, prompts, completions, alive)


@partial(jax.jit, static_argnames=("count",))
def with_prompt_capacity(state: Decoding, *, count: int) -> Decoding:
    """Change the capacity for prompt tokens to `count`."""
    return state._replace(cache=state.cache.with_prompt_capacity(count))


@partial(jax.jit, static_argnames=("shards",), donate_argnames=("state",))
def refilled(state: Decoding, slots: jax.Array, fresh: Decoding, *, shards: Shards | None = None) -> Decoding:
    """Replace the prompts in `slots` by the prompts of `fresh`, a state with one token each.

    Args:
        slots: int32 `[P']`, numbered within the shard; prompts with an out-of-range slot are dropped.
    """

    def specs(shards: Shards) -> tuple:
        return (Decoding.specs(shards), shards.rows, Decoding.specs(shards)), Decoding.specs(shards)

    return shard_mapped(shards, _refilled, specs)(state, slots, fresh)


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
    """Completions per prompt."""
    return len(state.tokens) // len(state.cache.fill.prompt_lengths)


def with_token(state: Decoding, drawn: jax.Array, logps: jax.Array | None, stops: Stops) -> Decoding:
    """Append the sampled tokens `drawn` `[B]` to the completions that are alive. Ended ones are padded, unless their
    ring buffer is full, in which case they keep their tokens."""
    place = state.count % state.capacity
    full = state.drawn >= state.capacity

    def written(ring: jax.Array, new: jax.Array, pad: jax.Array | int) -> jax.Array:
        of_ended = jnp.where(full, ring[:, place], pad)
        return ring.at[:, place].set(jnp.where(state.alive, new, of_ended).astype(ring.dtype))

    ended = jnp.any(drawn[:, None] == stops.eos, axis=1) | (state.drawn + 1 >= stops.max_new)
    return state._replace(
        tokens=written(state.tokens, drawn, stops.pad),
        count=state.count + 1,
        lengths=state.lengths + state.alive,
        alive=state.alive & ~ended,
        logps=None if state.logps is None else written(state.logps, logps, 0),
    )


# Decoding steps


class SamplingInputs(NamedTuple):
    """Sampling inputs: the logits processors, and the prompts as the processors see them.

    processors: in order.
    prompt_ids: int32 `[B, W]`, left-padded; columns from `prompt_length` on are unused.
    prompt_length: int32 scalar.
    pads: int32 `[B]`, number of padding columns on the left.
    temperature: divides the logits for the recorded log-probabilities.
    """

    processors: tuple[Processor, ...]
    prompt_ids: jax.Array
    prompt_length: jax.Array
    pads: jax.Array
    temperature: jax.Array

    @classmethod
    def specs(cls, shards: Shards) -> SamplingInputs:
        """Partition specs."""
        return cls(shards.whole, shards.rows, shards.whole, shards.rows, shards.whole)

    def history(self, state: Decoding) -> History:
        padded = jnp.pad(self.prompt_ids, ((0, 0), (0, state.capacity)))
        ids = jax.lax.dynamic_update_slice(padded, state.in_order(), (0, self.prompt_length))
        return History(ids, self.prompt_length + state.drawn, self.prompt_length, self.pads)


class Status(NamedTuple):
    """Copies of fields of `Decoding` for the host to inspect while the state itself is donated to the next call."""

    count: jax.Array
    alive: jax.Array

    @classmethod
    def of(cls, state: Decoding, shards: Shards | None) -> Status:
        return cls(state.count, all_gather_rows(shards, state.alive))


def _sampled(logits, state: Decoding, noise: Noise | None, step, sampling: SamplingInputs):
    """Sample ids `[B]` from `logits` `[B, V]`; also returns their log-probabilities if these are recorded."""
    scores = process(sampling.processors, sampling.history(state), logits) if sampling.processors else logits
    ids = jnp.argmax(scores, axis=-1) if noise is None else sample(scores, noise.exponentials(step, logits.shape[1]))
    ids = ids.astype(jnp.int32)
    if state.logps is None:
        return ids, None
    scaled = logits / sampling.temperature
    at_ids = jnp.take_along_axis(scaled, jnp.maximum(ids, 0)[:, None], axis=1)[:, 0]
    return ids, at_ids - jax.nn.logsumexp(scaled, axis=1)


@partial(jax.jit, static_argnames=("shards",), donate_argnames=("state",))
def first_tokens(
    logits: jax.Array,
    state: Decoding,
    stops: Stops,
    noise: Noise | None,
    sampling: SamplingInputs,
    *,
    shards: Shards | None = None,
) -> tuple[Decoding, Status]:
    """Sample the first token of each completion from the prompt logits `[P, V]`."""

    def of_shard(logits, state, stops, noise, sampling):
        logits = jnp.repeat(logits, len(state.alive) // len(logits), axis=0)
        state = with_token(state, *_sampled(logits, state, noise, 0, sampling), stops)
        return state, Status.of(state, shards)

    def specs(shards: Shards) -> tuple:
        arguments = shards.rows, Decoding.specs(shards), shards.whole, *_sampling_specs(shards, noise)
        return arguments, (Decoding.specs(shards), shards.whole)

    return shard_mapped(shards, of_shard, specs)(logits, state, stops, noise, sampling)


def _sampling_specs(shards: Shards, noise: Noise | None) -> tuple:
    """Partition specs of noise and `SamplingInputs`."""
    return None if noise is None else noise.specs(shards), SamplingInputs.specs(shards)


class LastTokens:
    """Runs the model on the last token of each completion. For use inside compiled programs.

    Args:
        max_tokens: upper bound on prompt + completion.
    """

    def __init__(self, weights: Weights, max_tokens: int):
        self._weights, self._max_tokens = weights, max_tokens
        self._trunk, self._headed = trunk_of(weights.model()), weights.model_with_cast_head()

    def angles(self, state: Decoding, longest: jax.Array) -> dict[str, jax.Array]:
        """Rope angles, if the longest text including its next token has `longest` tokens."""
        return self._trunk.angles(_positions(state), longest)

    def __call__(
        self, state: Decoding, longest: jax.Array, angles: dict[str, jax.Array]
    ) -> tuple[jax.Array, list[NewEntries]]:
        """Float32 logits `[B, V]`, and the new entries for the cache."""
        weights = self._weights
        tokens = jax.lax.dynamic_slice_in_dim(state.tokens, (state.count - 1) % state.capacity, 1, axis=1)
        options = {"layers": weights.layers, "dtype": weights.dtype, "max_tokens": self._max_tokens}
        options |= {"cache": state.cache, "angles": angles}
        hidden, new = with_keys(self._trunk, tokens, _positions(state), None, longest, **options)
        return weights.logits(self._headed, hidden), new


def _positions(state: Decoding) -> jax.Array:
    """Positions of the next tokens, int32 `[B, 1]`."""
    positions_P = state.cache.fill.next_positions
    return jnp.repeat(positions_P, _group(state))[:, None]


@partial(jax.jit, static_argnames=("max_tokens", "keeps"), donate_argnames=("state",))
def next_tokens(
    weights: Weights,
    state: Decoding,
    stops: Stops,
    noise: Noise | None,
    sampling: SamplingInputs,
    first: jax.Array,
    steps: jax.Array,
    longest: jax.Array,
    *,
    max_tokens: int,
    keeps: bool = False,
) -> tuple[Decoding, Status]:
    """Decode up to `steps` tokens of each completion; stops early if all have ended.

    Args:
        first: the step of the `noise` chunk to start from; without noise, decoding is greedy.
        longest: int32 scalar, tokens of the longest text including its next token.
        max_tokens: upper bound on prompt + completion.
        keeps: whether completions that have ended keep their cache.
    """
    shards = weights.shards

    def of_shard(arrays, layers, state, stops, noise, sampling, first, steps, longest):
        model = LastTokens(replace(weights, arrays=arrays, layers=layers), max_tokens)

        def any_alive(state: Decoding) -> jax.Array:
            """All shards run the same number of steps because each step communicates."""
            return any_shard(shards, jnp.any(state.alive))

        def step(carry):
            number, state, angles, _ = carry
            logits, new = model(state, longest + number, angles)
            ids, logps = _sampled(logits, state, noise, first + number, sampling)
            cache = state.cache.appended(new, after=ids, alive=state.alive if keeps else None)
            state = with_token(state._replace(cache=cache), ids, logps, stops)
            # Compute the angles for the next step here: if they were used in the same step, XLA would recompute them in
            # every layer and head.
            return number + 1, state, model.angles(state, longest + (number + 1)), any_alive(state)

        def goes_on(carry):
            number, _, _, alive = carry
            return (number < steps) & alive

        begin = jnp.int32(0), state, model.angles(state, longest), any_alive(state)
        state = jax.lax.while_loop(goes_on, step, begin)[1]
        return state, Status.of(state, shards)

    def specs(shards: Shards) -> tuple:
        state, whole = Decoding.specs(shards), shards.whole
        arguments = shards.params, whole, state, whole, *_sampling_specs(shards, noise), whole, whole, whole
        return arguments, (state, whole)

    run = shard_mapped(shards, of_shard, specs, parameters=True)
    return run(weights.arrays, weights.layers, state, stops, noise, sampling, first, steps, longest)
