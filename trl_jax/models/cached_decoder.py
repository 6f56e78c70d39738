"""The decoder beside a cache: what a text's tokens leave for those that follow, and tokens that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trl_jax.models.arch import Run, Turns, turns_of
from trl_jax.models.decoder import Decoder, last_layer, of_run, read, whole_layer
from trl_jax.nn.attention.inputs import AttentionInputs, LayerInputs
from trl_jax.nn.cache import Cache, Kept

Walked = tuple[jax.Array, list[Kept], tuple[Any, Any]]  # hidden states, what is kept, and the last layer's, and cache


def with_keys(
    decoder: Decoder,
    tokens: jax.Array,
    positions: jax.Array,
    reads: jax.Array | None,
    longest: jax.Array,
    *,
    cache: Cache | None = None,
    layers: list[nnx.State] | None = None,
    dtype: jnp.dtype = jnp.float32,
    max_tokens: int | None = None,
    angles: dict[str, jax.Array] | None = None,
) -> tuple[jax.Array, list[Kept]]:
    """Hidden states `[N, D]`, and what a cache keeps of the tokens: part by part (models/arch.py), with an
    axis L in front; or of each layer, without it, where `layers` are given. Layers that reuse keys and values keep
    nothing.

    Args:
        tokens, positions, reads, dtype, max_tokens: as in a call of the decoder; rows of one token each where there is
            a cache; elsewhere the one read of a row is its text's last token.
        longest: the tokens of the longest text so far, for ropes that ask.
        cache: what the rows' tokens follow, its parts like those that are given back; None where texts begin here.
        layers: the parameters of each layer, taken out of its stack; None computes with the stacks, in scans.
        angles: what `decoder.angles` gives for these positions; None computes it here.
    """
    shared = AttentionInputs(decoder.arch.head_dim**-0.5, places=None if cache is None else cache.places)
    shared = shared._replace(**(angles or {}))
    if cache is None:
        shared = shared._replace(lengths=reads % tokens.shape[1] + 1)
    h, shared, by_layer = decoder.begin(shared, tokens, positions, longest, max_tokens, dtype)
    parts = repeat(None) if cache is None else iter(cache.parts)
    kept, last = [], {}
    for run in decoder.arch.runs:
        graph, state = nnx.split(vars(decoder)[run.name])
        earlier = last[run.kind.heads] if run.kind.reuses else None
        layer = partial(_layer, graph, f"{decoder.NAME}.{run.name}", shared, earlier, dtype)
        turns = turns_of(decoder.arch, run)
        scan = _scan if cache is None or run.kind.reuses else _in_turns
        walk = partial(scan, state, turns) if layers is None else partial(_one_by_one, layers)
        h, new, of_last = walk(layer, h, run, by_layer, repeat(None) if run.kind.reuses else parts)
        kept += [] if run.kind.reuses else new
        if run.kind.reused:
            last[run.kind.heads] = of_last
    return decoder.finish(read(h, reads, tokens.shape[1], None), dtype), kept


def _layer(
    graph: nnx.GraphDef, stack: str, shared: AttentionInputs, earlier: Any, dtype: jnp.dtype, h: jax.Array, slices: Any
) -> tuple[jax.Array, Kept | None]:
    """One layer, and what it keeps; `earlier` are keys and values, and the cache, of the layer whose it reuses."""
    state, inputs, own_cache = slices
    reused, cache = earlier or (None, own_cache)
    inputs = shared.of_layer(inputs)._replace(reused=reused, cache=cache)
    out = nnx.merge(graph, whole_layer(state, stack))(h, inputs, dtype=dtype)
    return out.h, out.kept if earlier is None else None


def _scan(
    state: nnx.State, turns: Turns, layer: Callable, h: jax.Array, run: Run, by_layer: LayerInputs, caches: Iterator
) -> Walked:
    """Through a run of layers in a scan along their stack, without a cache of their own."""
    del caches
    h, new = jax.lax.scan(layer, h, (state, of_run(by_layer, run), None))
    return h, [_of_layers(new, run, part.layers) for part in turns.parts], (last_layer(new), None)


def _in_turns(
    state: nnx.State, turns: Turns, layer: Callable, h: jax.Array, run: Run, by_layer: LayerInputs, caches: Iterator
) -> Walked:
    """Through a run of layers beside their parts of a cache, in a scan of which a turn computes several layers."""
    inputs, own, pattern = (state, of_run(by_layer, run)), [next(caches) for _ in turns.parts], turns.pattern

    def turn(h: jax.Array, number: jax.Array | int, count: int = len(pattern)) -> tuple[jax.Array, list[Any]]:
        """The first `count` layers of a turn, and what they keep, `[N, ...]` for each part."""
        new = [[] for _ in own]
        for place, part in enumerate(pattern[:count]):
            slot = number * pattern.count(part) + len(new[part])
            h, kept = layer(h, (*_at(inputs, number * len(pattern) + place), _at(own[part], slot)))
            new[part].append(kept)
        return h, [jax.tree.map(lambda *leaves: jnp.stack(leaves), *each) if each else None for each in new]

    whole, rest = divmod(run.count, len(pattern))
    h, new = jax.lax.scan(turn, h, jnp.arange(whole))
    new = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), new)
    if rest:
        h, more = turn(h, whole, rest)
        new = [each if other is None else _joined(each, other) for each, other in zip(new, more, strict=True)]
    of_last = pattern[rest - 1]
    return h, new, (last_layer(new[of_last]), last_layer(own[of_last]))


def _at(arrays: Any, place: jax.Array | int) -> Any:
    """Those at a place of the leading axis."""
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, place, keepdims=False), arrays)


def _joined(first: Any, then: Any) -> Any:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), first, then)


def _of_layers(kept: Any, run: Run, layers: tuple[int, ...]) -> Any:
    """Those of some layers, of arrays of all layers of a run."""
    if len(layers) == run.count:
        return kept
    return jax.tree.map(lambda leaf: leaf[np.asarray(layers) - run.first], kept)


def _one_by_one(
    layers: list[nnx.State], layer: Callable, h: jax.Array, run: Run, by_layer: LayerInputs, caches: Iterator
) -> Walked:
    """Through a run of layers, each with its own parameters and part of the cache."""
    kept, new, cache = [], None, None
    for number in range(run.first, run.first + run.count):
        cache = next(caches)
        h, new = layer(h, (layers[number], jax.tree.map(itemgetter(number), by_layer), cache))
        kept.append(new)
    return h, kept, (new, cache)
