"""The decoder with a cache: prefill, continued texts, and decoding one token at a time."""

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

from trl_jax.models.arch import LayerPattern, Run, layer_pattern_of
from trl_jax.models.decoder import Decoder, Features, last_layer, of_run, read, whole_layer
from trl_jax.nn.attention.inputs import AttentionInputs, LayerInputs
from trl_jax.nn.cache import Cache, NewEntries

# Hidden states, new entries by cache part, and the new entries and the cache of the last layer
_Walked = tuple[jax.Array, list[NewEntries], tuple[Any, Any]]


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
    features: Features | None = None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, list[NewEntries]]:
    """Hidden states `[N, D]`, and the new entries for the cache: for each cache part (see models/arch.py), with a
    leading layer axis; if `layers` is given, for each layer without that axis. Layers that reuse keys and values are
    left out.

    Args:
        tokens, positions, reads, dtype, max_tokens: as in `Decoder.__call__`. Rows have one read each, their last
            token; with a cache, None for rows of one token. Rows of several tokens continue the prompts of the cache.
        longest: length of the longest text so far, for ropes that depend on it.
        cache: the preceding tokens, in the same parts as the result; None at the start of the texts.
        layers: the parameters of each layer, already sliced from its stack; None to scan over the stacks.
        angles: `decoder.angles` for these positions; None computes it here.
        features: as in `Decoder.__call__`. Only without a cache: generated tokens are never images.
        lengths: int32 `[R]`, tokens of each row that continues a prompt of the cache; may be 0.
    """
    shared = AttentionInputs(decoder.arch.head_dim**-0.5, fill=None if cache is None else cache.fill)
    shared = shared._replace(**(angles or {}), lengths=lengths)
    if cache is None:
        shared = shared._replace(lengths=reads % tokens.shape[1] + 1, ahead=decoder.image_ahead(features, None))
    h, shared, by_layer = decoder.begin(shared, tokens, positions, longest, max_tokens, dtype, features=features)
    parts = repeat(None) if cache is None else iter(cache.parts)
    new, last = [], {}
    for run in decoder.arch.runs:
        graph, state = nnx.split(vars(decoder)[run.name])
        earlier = last[run.kind.heads] if run.kind.reuses else None
        layer = partial(_run_layer, graph, f"{decoder.NAME}.{run.name}", shared, earlier, dtype, features)
        pattern = layer_pattern_of(decoder.arch, run)
        scan = _scan_layers if cache is None or run.kind.reuses else _scan_periods
        walk = partial(scan, state, pattern) if layers is None else partial(_unrolled, layers)
        h, new_of_run, of_last = walk(layer, h, run, by_layer, repeat(None) if run.kind.reuses else parts)
        new += [] if run.kind.reuses else new_of_run
        if run.kind.reused:
            last[run.kind.heads] = of_last
    return decoder.finish(read(h, reads, tokens.shape[1], None), dtype), new


def _run_layer(
    graph: nnx.GraphDef,
    stack: str,
    shared: AttentionInputs,
    earlier: Any,
    dtype: jnp.dtype,
    features: Features | None,
    h: jax.Array,
    slices: Any,
) -> tuple[jax.Array, NewEntries | None]:
    """Run one layer and return its new entries. `earlier`: the keys, values and cache of the layer it reuses, if
    any."""
    state, inputs, layer_cache = slices
    reused, cache = earlier or (None, layer_cache)
    inputs_of_layer = shared.of_layer(inputs)._replace(reused=reused, cache=cache)
    out = nnx.merge(graph, whole_layer(state, stack))(h, inputs_of_layer, dtype=dtype)
    h = out.h if inputs.number is None else features.added(out.h, inputs.number)
    return h, out.new if earlier is None else None


def _scan_layers(
    state: nnx.State,
    pattern: LayerPattern,
    layer: Callable,
    h: jax.Array,
    run: Run,
    by_layer: LayerInputs,
    caches: Iterator,
) -> _Walked:
    """Run a sequence of layers by scanning over their stack. Used when these layers have no cache of their own."""
    del caches
    h, new = jax.lax.scan(layer, h, (state, of_run(by_layer, run), None))
    return h, [_select_layers(new, run, part.layers) for part in pattern.parts], (last_layer(new), None)


def _scan_periods(
    state: nnx.State,
    pattern: LayerPattern,
    layer: Callable,
    h: jax.Array,
    run: Run,
    by_layer: LayerInputs,
    caches: Iterator,
) -> _Walked:
    """Run a sequence of layers and their parts of the cache in a scan, one period of the pattern per step."""
    inputs, parts, part_of = (state, of_run(by_layer, run)), [next(caches) for _ in pattern.parts], pattern.part_of

    def period(h: jax.Array, number: jax.Array | int, count: int = len(part_of)) -> tuple[jax.Array, list[Any]]:
        """Run the first `count` layers of a period; returns their new entries, `[N, ...]` for each part."""
        new = [[] for _ in parts]
        for place, part in enumerate(part_of[:count]):
            slot = number * part_of.count(part) + len(new[part])
            h, entries = layer(h, (*_index(inputs, number * len(part_of) + place), _index(parts[part], slot)))
            new[part].append(entries)
        return h, [jax.tree.map(lambda *leaves: jnp.stack(leaves), *group) if group else None for group in new]

    whole, rest = divmod(run.count, len(part_of))
    h, new = jax.lax.scan(period, h, jnp.arange(whole))
    new = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), new)
    if rest:
        h, rest_new = period(h, whole, rest)
        new = [part if last is None else _concatenate(part, last) for part, last in zip(new, rest_new, strict=True)]
    of_last = part_of[rest - 1]
    return h, new, (last_layer(new[of_last]), last_layer(parts[of_last]))


def _index(arrays: Any, place: jax.Array | int) -> Any:
    """Index the leading axis."""
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, place, keepdims=False), arrays)


def _concatenate(first: Any, second: Any) -> Any:
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), first, second)


def _select_layers(new: Any, run: Run, layers: tuple[int, ...]) -> Any:
    """Select layers from arrays that cover all layers of a run."""
    if len(layers) == run.count:
        return new
    return jax.tree.map(lambda leaf: leaf[np.asarray(layers) - run.first], new)


def _unrolled(
    layers: list[nnx.State], layer: Callable, h: jax.Array, run: Run, by_layer: LayerInputs, caches: Iterator
) -> _Walked:
    """Run a sequence of layers one by one, each with its own parameters and cache."""
    new, cache = [], None
    for number in range(run.first, run.first + run.count):
        cache = next(caches)
        h, entries = layer(h, (layers[number], jax.tree.map(itemgetter(number), by_layer), cache))
        new.append(entries)
    return h, new, (new[-1], cache)
