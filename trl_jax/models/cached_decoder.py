"""The decoder beside a cache: what a text's tokens leave for those that follow, and tokens that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trl_jax.models.arch import Run
from trl_jax.models.decoder import Decoder
from trl_jax.models.stack import last_layer, of_run, read, whole_layer
from trl_jax.nn.attention.inputs import AttentionInputs, LayerInputs
from trl_jax.nn.cache.cache import Cache, Kept

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
) -> tuple[jax.Array, list[Kept]]:
    """Hidden states `[N, D]`, and what a cache keeps of the tokens: of each run of layers, with a leading axis L; or of
    each layer, without it, where `layers` are given. Layers that reuse keys and values keep nothing.

    Args:
        tokens, positions, reads, dtype, max_tokens: as in a call of the decoder; rows of one token each where there is
            a cache; elsewhere the one read of a row is its text's last token.
        longest: the tokens of the longest text so far, for ropes that ask.
        cache: what the rows' tokens follow, its parts like those that are given back; None where texts begin here.
        layers: the parameters of each layer, taken out of its stack; None computes with the stacks, in scans.
    """
    shared = AttentionInputs(decoder.arch.head_dim**-0.5, places=None if cache is None else cache.places)
    if cache is None:
        shared = shared._replace(lengths=reads % tokens.shape[1] + 1)
    h, shared, by_layer = decoder.begin(shared, tokens, positions, longest, max_tokens, dtype)
    parts = repeat(None) if cache is None else iter(cache.parts)
    kept, last = [], {}
    for run in decoder.arch.runs:
        graph, state = nnx.split(vars(decoder)[run.name])
        earlier = last[run.kind.heads] if run.kind.reuses else None
        layer = partial(_layer, graph, f"{decoder.NAME}.{run.name}", shared, earlier, dtype)
        walk = partial(_scan, state) if layers is None else partial(_one_by_one, layers)
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
    state: nnx.State, layer: Callable, h: jax.Array, run: Run, by_layer: LayerInputs, caches: Iterator
) -> Walked:
    """Through a run of layers in a scan along their stack, whose cache is one part."""
    cache = next(caches)
    h, new = jax.lax.scan(layer, h, (state, of_run(by_layer, run), cache))
    return h, [new], (last_layer(new), last_layer(cache))


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
