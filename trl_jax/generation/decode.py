"""Compiled programs of generation: prefill, updates of the decoding state, and sharding over devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trl_jax.core.outputs import reads_of_rows
from trl_jax.data.images import TEXT_ALONE, PromptImages
from trl_jax.mesh.mesh import SEQUENCE, TENSOR, ShardedParams, only, platform
from trl_jax.models.arch import cache_parts
from trl_jax.models.cached_decoder import with_keys
from trl_jax.models.decoder import Features, in_a_stack
from trl_jax.models.model import logical_axes, merge
from trl_jax.nn.cache import Cache, CacheFill, CacheSize, NewEntries, each_entry, grown_ring
from trl_jax.nn.linear import EncodedWeight

# Prefill


@partial(
    jax.jit, static_argnames=("graph", "group", "capacity", "max_tokens", "dtype", "head_dtype", "by_layer", "shards")
)
def prefill(
    graph: Any,
    arrays: dict[str, jax.Array],
    tokens: jax.Array,
    lengths: jax.Array,
    longest: jax.Array,
    seen: PromptImages = TEXT_ALONE,
    *,
    group: int,
    capacity: int,
    max_tokens: int,
    dtype: jnp.dtype,
    by_layer: bool,
    head_dtype: jnp.dtype | None = None,
    shards: Shards | None = None,
) -> tuple[jax.Array, Cache]:
    """Run the prompts through the model.

    Args:
        tokens: int32 `[P, S]`, right-padded prompts.
        lengths: int32 `[P]`, prompt lengths, at least 1.
        longest: int32 scalar, tokens of the longest text in the call.
        seen: the images of the prompts.
        group: completions per prompt.
        capacity: cache capacity per completion, in tokens.
        max_tokens: upper bound on prompt + completion; attention windows of at least this size are ignored.
        by_layer: whether the cache has one part per layer instead of one per stack of layers (models/arch.py).
        head_dtype: dtype of the head's computation; None means `dtype`.

    Returns:
        float32 logits `[P, V]` of the token after each prompt, and the cache for `group` completions of each.
    """
    head_dtype = dtype if head_dtype is None else head_dtype

    def of_shard(arrays, tokens, lengths, longest, seen):
        model = merge(graph, arrays)
        trunk = trunk_of(model)
        features = None if seen.images is None else model.features(seen.images, dtype=dtype)
        options = {"positions": seen.positions, "features": features}
        hidden, new = _through(trunk, tokens, lengths, longest, dtype, max_tokens, **options)
        logits = model.outputs(hidden.astype(dtype), None, head_dtype, None, 1.0).astype(jnp.float32)
        parts = [
            each_entry(lambda entry, size=size: entry.cache(lengths, size), entries)
            for entries, size in zip(new, _cache_sizes(trunk, group, capacity), strict=True)
        ]
        parts = by_layers(parts, trunk.arch) if by_layer else parts
        return logits, Cache(parts, CacheFill(lengths, jnp.zeros_like(lengths), jnp.int32(0), seen.offsets))

    def specs(own: Shards) -> tuple:
        return (own.params, own.rows, own.rows, own.whole, own.rows), (own.rows, own.cache)

    return shard_mapped(shards, of_shard, specs, parameters=True)(arrays, tokens, lengths, longest, seen)


def _through(
    trunk: nnx.Module,
    tokens: jax.Array,
    lengths: jax.Array,
    longest: jax.Array,
    dtype: jnp.dtype,
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
    options = {"dtype": dtype, "max_tokens": max_tokens, "features": features}
    return with_keys(trunk, tokens, positions, reads, longest, **options)


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
    _, cache = prefill.eval_shape(
        weights.graph, weights.arrays, tokens, lengths, longest, TEXT_ALONE, group=group, capacity=first,
        max_tokens=max_tokens, dtype=weights.dtype, head_dtype=weights.head_dtype, by_layer=weights.layers is not None,
        shards=None,
    )  # fmt: skip
    state = initial_state(cache, np.ones(prompts[0] * group, bool), first, logps=False)
    return grown_shapes(state, capacity=last).cache


@partial(jax.jit, static_argnames=("graph", "max_tokens", "dtype", "by_layer", "shards"), donate_argnames=("state",))
def recomputed(
    graph: Any,
    arrays: dict[str, jax.Array],
    state: Decoding,
    texts: jax.Array,
    longest: jax.Array,
    *,
    max_tokens: int,
    dtype: jnp.dtype,
    by_layer: bool,
    shards: Shards | None = None,
) -> Decoding:
    """Recompute the cache for a longest text of `longest` tokens: LongRoPE changes the rotation of all tokens once a
    text exceeds a certain length.

    Args:
        texts: int32 `[B, S + T]`, each prompt followed by its completion so far, right-padded.
    """

    def of_shard(arrays, state, texts, longest):
        fill = state.cache.fill
        group = len(texts) // len(fill.prompt_lengths)
        lengths = jnp.maximum(jnp.repeat(fill.prompt_lengths + fill.completion_lengths, group), 1)
        trunk = trunk_of(merge(graph, arrays))
        _, new = _through(trunk, texts, lengths, longest, dtype, max_tokens)
        parts = [
            each_entry(lambda entry, size=size: entry.cache_of_texts(fill, size), entries)
            for entries, size in zip(new, _cache_sizes(trunk, group, state.capacity), strict=True)
        ]
        return state._replace(cache=Cache(by_layers(parts, trunk.arch) if by_layer else parts, fill))

    def specs(own: Shards) -> tuple:
        return (own.params, Decoding.specs(own), own.rows, own.whole), Decoding.specs(own)

    return shard_mapped(shards, of_shard, specs, parameters=True)(arrays, state, texts, longest)


def _cache_sizes(trunk: nnx.Module, group: int, capacity: int) -> list[CacheSize]:
    """The size of each part of the cache."""
    return [CacheSize(group, capacity, part.window) for part in cache_parts(trunk.arch)]


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
    kept = np.zeros(tokens.shape, np.float32) if logps else None
    return Decoding(cache, tokens, np.int32(0), np.zeros(len(alive), np.int32), alive, kept)


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

    def select(array: jax.Array, axis: int, each: bool) -> jax.Array:
        new = _selected_array(array, prompts, completions if each else None, axis=axis, shards=shards)
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

    def specs(own: Shards) -> tuple:
        of_array = PartitionSpec(*[None] * axis, own.axes)
        return (of_array, own.rows, own.rows), of_array

    return shard_mapped(shards, of_shard, specs)(array, prompts, completions)


@partial(jax.jit, static_argnames=("shards",))
def _selected_rows(
    state: Decoding, prompts: jax.Array, completions: jax.Array, alive: jax.Array, *, shards: Shards | None
) -> Decoding:
    """`selected` for a state without the parts of its cache."""

    def of_shard(state: Decoding, prompts: jax.Array, completions: jax.Array, alive: jax.Array) -> Decoding:
        rows = (prompts[:, None] * _group(state) + completions).reshape(-1)
        logps = None if state.logps is None else state.logps[rows]
        own = {"tokens": state.tokens[rows], "lengths": state.lengths[rows], "alive": alive.reshape(-1), "logps": logps}
        return state._replace(cache=state.cache._replace(fill=state.cache.fill.selected(prompts)), **own)

    def specs(own: Shards) -> tuple:
        return (Decoding.specs(own), *[own.rows] * 3), Decoding.specs(own)

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

    def specs(own: Shards) -> tuple:
        return (Decoding.specs(own), own.rows, Decoding.specs(own)), Decoding.specs(own)

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


# Weights

_LARGEST = 512 * 2**20  # most bytes of layers that are unstacked for decoding on a CPU


class Weights(NamedTuple):
    """The model's arrays as generation uses them, including copies that make a call faster.

    layers: each layer's arrays, separately (see `layers_for_decoding`); None decodes along the stack.
    dtype, head_dtype: compute dtypes of the decoder and of the head.
    shards: the devices that rows are sharded over; None on a single device.
    """

    graph: Any
    arrays: dict[str, jax.Array]
    layers: list[nnx.State] | None
    dtype: Any
    head_dtype: Any
    shards: Shards | None = None

    @classmethod
    def of(cls, graph: Any, arrays: dict[str, jax.Array], dtype: Any = jnp.float32, head_dtype: Any = None) -> Weights:
        """Prepare a model's arrays; `head_dtype` None means `dtype`."""
        dtype = jnp.dtype(dtype)
        head_dtype = dtype if head_dtype is None else jnp.dtype(head_dtype)
        arrays = matrices_in(graph, arrays, dtype, head_dtype)
        arrays, shards = shard_for_generation(arrays, device_memory())
        layers = layers_for_decoding(graph, arrays, shards, platform())
        shards = None if shards is None else replace(shards, by_layer=layers is not None)
        return cls(graph, arrays, layers, dtype, head_dtype, shards)


def shard_for_generation(arrays: dict[str, Any], memory: int | None) -> tuple[dict[str, Any], Shards | None]:
    """The arrays as sharded for generation, and the devices that rows are sharded over. For `memory` and for shapes
    instead of arrays, see `gathered_once`."""
    stacked = frozenset(filter(in_a_stack, arrays))
    shards = shards_of(arrays, stacked)
    if shards is None:
        return arrays, None
    arrays = on_their_mesh(gathered_once(arrays, shards, memory), shards)
    return arrays, shards_of(arrays, stacked)


def device_memory() -> int | None:
    """Memory of a device in bytes; None if the backend does not report it."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def longrope_switch_length(weights: Weights) -> int | None:
    """The text length above which LongRoPE rotates all tokens differently; None without LongRoPE."""
    ropes = trunk_of(merge(weights.graph, weights.arrays)).arch.ropes
    lengths = [rope.switch_length for rope in ropes if rope is not None]
    return min((length for length in lengths if length is not None), default=None)


def model_with_cast_head(graph: Any, arrays: dict[str, jax.Array], dtype: jnp.dtype) -> nnx.Module:
    """The model for computing logits, with the table of a tied head cast to the head's `dtype` once instead of in every
    step. Do not use its trunk for embedding lookups."""
    model = merge(graph, arrays)
    embed = trunk_of(model).embed
    if model.lm_head.weight is None and not isinstance(embed.weight, EncodedWeight):
        embed.weight = nnx.Param(embed.weight[...].astype(dtype))
    return model


def trunk_of(model: nnx.Module) -> nnx.Module:
    """The decoder of a model."""
    return vars(model)[model.trunk_name]


@partial(jax.jit, static_argnums=0)
def _unstacked(graph: Any, arrays: dict[str, jax.Array]) -> list[nnx.State]:
    trunk = trunk_of(merge(graph, arrays))
    return [layer for run in trunk.arch.runs for layer in unstacked(nnx.split(vars(trunk)[run.name])[1], run.count)]


def unstacked(stack: Any, count: int) -> list[Any]:
    """Split arrays with a leading axis of `count` layers into a list, one entry per layer."""
    return [jax.tree.map(lambda leaf: leaf[i], stack) for i in range(count)]  # noqa: B023


def by_layers(parts: list[Any], arch: Any) -> list[Any]:
    """Split cache parts that cover several layers (models/arch.py) into one part per layer that has a cache."""
    of_layer = {}
    for part, (layers, _) in zip(parts, cache_parts(arch), strict=True):
        of_layer |= zip(layers, unstacked(part, len(layers)), strict=True)
    return [of_layer[layer] for layer in sorted(of_layer)]


def layers_for_decoding(
    graph: Any, arrays: dict[str, jax.Array], shards: Shards | None, platform: str
) -> list[nnx.State] | None:
    """Each layer's parameters, separately, for small models on a CPU; None decodes along the stack.

    On a CPU, a scan copies each layer's weights and cache out of the stacks in every iteration, which takes half of a
    small model's time. Other backends do not copy, and a large model has no memory for another copy.
    """
    return _unstacked(graph, arrays) if decodes_by_layer(arrays, shards, platform) else None


def decodes_by_layer(arrays: Mapping[str, Any], shards: Shards | None, platform: str) -> bool:
    """Whether `layers_for_decoding` unstacks the layers; `arrays` may be shapes."""
    if shards is not None and not shards.params_replicated:
        return False
    stacked = [array for path, array in arrays.items() if in_a_stack(path)]
    return platform == "cpu" and sum(array.size * array.dtype.itemsize for array in stacked) <= _LARGEST


def layer_shapes(graph: Any, arrays: Mapping[str, jax.ShapeDtypeStruct]) -> list[nnx.State]:
    """The shapes that `layers_for_decoding` would return."""
    return jax.eval_shape(partial(_unstacked, graph), arrays)


def matrices_in(
    graph: Any, arrays: dict[str, jax.Array], dtype: jnp.dtype, head_dtype: jnp.dtype | None = None
) -> dict[str, jax.Array]:
    """Cast the weight matrices to `dtype` once. The products are the same, but each step reads half the bytes.

    Norms, biases, adapters and the embedding table are not cast.
    """
    names = cast_matrices(graph, arrays, dtype, head_dtype)
    return arrays | _cast({path: arrays[path] for path in names}, dtype) if names else arrays


def cast_matrices(graph: Any, arrays: Mapping[str, Any], dtype: jnp.dtype, head_dtype: jnp.dtype | None) -> list[str]:
    """Paths of the matrices that `matrices_in` casts; `arrays` may be shapes."""
    if dtype == jnp.float32:
        return []
    axes_of = logical_axes(lambda: merge(graph, _zeros_like(arrays)))
    names = [path for path, axes in axes_of.items() if _is_matrix(path, axes) and path in arrays]
    if head_dtype == jnp.float32:
        names = [path for path in names if not path.startswith("lm_head.")]
    return [path for path in names if arrays[path].dtype == jnp.float32]


@partial(jax.jit, static_argnums=1)
def _cast(arrays: dict[str, jax.Array], dtype: jnp.dtype) -> dict[str, jax.Array]:
    return jax.tree.map(lambda array: array.astype(dtype), arrays)


def _zeros_like(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: jnp.zeros(array.shape, array.dtype) for path, array in arrays.items()}


def _is_matrix(path: str, axes: tuple[str, ...]) -> bool:
    """Whether the parameter is only used as a matrix, by a layer or an untied head."""
    if "norm" in axes:
        return False
    return axes == ("vocab", "embed") if path.startswith("lm_head.") else axes[0] == "layers" and len(axes) >= 3


# Several devices

_WHOLE = 1 / 4  # fraction of a device's memory up to which parameters are gathered once instead of in every step


@dataclass(frozen=True)
class Shards:
    """How generation is sharded: each device (or group of devices along `tensor`) gets an equal contiguous run of the
    prompts with all their completions.

    mesh: the product of its axes other than `tensor` is the number of shards.
    specs: partition spec of each parameter, by path.
    stacked: paths of parameters with a leading layer axis.
    by_layer: whether the cache has one part per layer instead of one per stack of layers.
    """

    mesh: Mesh
    specs: tuple[tuple[str, PartitionSpec], ...]
    stacked: frozenset[str]
    by_layer: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, size in self.mesh.shape.items() if axis != TENSOR and size > 1)

    @property
    def count(self) -> int:
        return prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def whole(self) -> PartitionSpec:
        """Spec of replicated arrays."""
        return PartitionSpec()

    @property
    def rows(self) -> PartitionSpec:
        """Spec of arrays whose first axis is prompts or completions."""
        return PartitionSpec(self.axes)

    @property
    def cache(self) -> Cache:
        """Specs of a cache."""
        parts = self.rows if self.by_layer else PartitionSpec(None, self.axes)
        return Cache(parts, CacheFill(self.rows, self.rows, self.whole, self.rows))

    @property
    def params(self) -> dict[str, PartitionSpec]:
        """Specs of parameters, by path."""
        return self._parts.own

    @property
    def params_replicated(self) -> bool:
        """Whether each shard has all parameters (sharded over `tensor` at most)."""
        return not any(axis for spec in self.params.values() for axis in spec)

    @property
    def _parts(self) -> ShardedParams:
        return ShardedParams(dict(self.specs), self.stacked)

    def mapped(self, body: Callable, of_arguments: Any, of_results: Any, *, parameters: bool) -> Callable:
        """Wrap `body` in a shard_map, so that each shard computes its own rows.

        Args:
            of_arguments, of_results: partition specs: `rows`, `cache`, `params` or `whole`.
            parameters: whether the first argument is a dict of parameters by path, which must be all-gathered.
        """
        body = self._parts.with_whole(body) if parameters else body
        if not self.axes:  # a single shard; XLA partitions the products over `tensor`
            return self._named(body)
        specs = {"in_specs": of_arguments, "out_specs": of_results}
        # check_vma only matters for gradients.
        return jax.shard_map(body, mesh=self.mesh, **specs, axis_names=set(self.axes), check_vma=False)

    def _named(self, body: Callable) -> Callable:
        def run(*arguments):
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return body(*arguments)

        return run


def shards_of(arrays: Mapping[str, Any], stacked: frozenset[str]) -> Shards | None:
    """The devices that a model's parameters are placed on; None for a single device.

    `arrays` may be shapes with shardings. The sequence axis of training, if any, also shards prompts here.
    """
    shardings = {path: array.sharding for path, array in arrays.items()}
    mesh = next((own.mesh for own in shardings.values() if isinstance(own, NamedSharding)), None)
    if mesh is None or mesh.size == 1:
        return None
    names = ["copies" if axis == SEQUENCE and size > 1 else axis for axis, size in mesh.shape.items()]
    mesh = Mesh(mesh.devices, names, axis_types=mesh.axis_types)
    whole = PartitionSpec()
    specs = ((path, own.spec if isinstance(own, NamedSharding) else whole) for path, own in shardings.items())
    return Shards(mesh, tuple(specs), stacked)


def on_their_mesh(arrays: dict[str, Any], shards: Shards) -> dict[str, Any]:
    """The same arrays, relabeled with the shards' mesh: JAX lowers custom-partitioned kernels such as cuDNN's for a
    single mesh only."""
    return {path: _named(array, shards.mesh) for path, array in arrays.items()}


def _named(array: Any, mesh: Mesh) -> Any:
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh == mesh:
        return array
    sharding = NamedSharding(mesh, sharding.spec)
    if not isinstance(array, jax.Array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def gathered_once(arrays: dict[str, Any], shards: Shards, memory: int | None) -> dict[str, Any]:
    """All-gather the parameters on every device (they stay sharded over `tensor`) unless that takes more than a quarter
    of a device's memory, in which case each step gathers one layer at a time.

    Args:
        arrays: may be shapes with shardings.
        memory: bytes per device; None if unknown.
    """
    shardings = {path: NamedSharding(shards.mesh, only((TENSOR,), spec)) for path, spec in shards.specs}
    numbers = {path: prod(own.shard_shape(arrays[path].shape)) for path, own in shardings.items()}
    taken = sum(number * arrays[path].dtype.itemsize for path, number in numbers.items())
    if memory is not None and taken > _WHOLE * memory:
        return arrays
    partitioned = {path: sharding for path, sharding in shardings.items() if any(shards.params[path])}
    own = {path: arrays[path] for path in partitioned}
    if not all(isinstance(array, jax.Array) for array in own.values()):
        shapes = {path: (array.shape, array.dtype) for path, array in own.items()}
        return arrays | {path: jax.ShapeDtypeStruct(*of, sharding=partitioned[path]) for path, of in shapes.items()}
    return arrays | _at(own, tuple(partitioned.items()))


@partial(jax.jit, static_argnums=1)
def _at(arrays: dict[str, jax.Array], shardings: tuple[tuple[str, NamedSharding], ...]) -> dict[str, jax.Array]:
    return {path: jax.lax.with_sharding_constraint(arrays[path], own) for path, own in shardings}


def shard_mapped(
    shards: Shards | None, body: Callable, specs: Callable[[Shards], tuple[Any, Any]], *, parameters: bool = False
) -> Callable:
    """`Shards.mapped` with the partition specs that `specs` returns; `body` itself without shards."""
    return body if shards is None else shards.mapped(body, *specs(shards), parameters=parameters)


def any_shard(shards: Shards | None, flag: jax.Array) -> jax.Array:
    """Whether `flag` is True on any shard."""
    return flag if shards is None or not shards.axes else jax.lax.pmax(flag.astype(jnp.int32), shards.axes) > 0


def all_gather_rows(shards: Shards | None, rows: jax.Array) -> jax.Array:
    """All-gather rows over the shards."""
    return rows if shards is None or not shards.axes else jax.lax.all_gather(rows, shards.axes, tiled=True)


def part_of_group(prompts: int, group: int, shards: int) -> int:
    """How many copies of each prompt to make, so that completions spread over the shards with the fewest rows on each.
    Among equal choices the smallest, because each copy prefills the prompt."""
    parts = [number for number in range(1, group + 1) if group % number == 0]
    return min(parts, key=lambda number: -(-prompts * number // shards) * (group // number))
