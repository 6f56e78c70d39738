"""Which layers of a decoder have their part of a cache in one array: those of a run that see as many tokens."""

from __future__ import annotations

from typing import NamedTuple

from trl_jax.models.arch.decoder import Arch
from trl_jax.models.arch.layers import Run

_LONGEST = 8  # layers of a turn, which are compiled one by one


class CachePart(NamedTuple):
    """The numbers of layers in the decoder, and how many tokens they see; None: all."""

    layers: tuple[int, ...]
    window: int | None


class Turns(NamedTuple):
    """A run of layers as turns in which their windows repeat: five narrow ones and a wide one in gemma3. The last turn
    may have fewer layers.

    parts: of the cache. pattern: the number of the part of each layer of a turn.
    """

    parts: tuple[CachePart, ...]
    pattern: tuple[int, ...]


def turns_of(arch: Arch, run: Run) -> Turns:
    """The turns of a run; without a pattern of few layers each turn is one of them, and all tokens are kept."""
    layers = range(run.first, run.first + run.count)
    windows = [_window(arch, layer) for layer in layers]
    lengths = range(1, _LONGEST + 1)
    length = next((each for each in lengths if windows == (windows[:each] * run.count)[: run.count]), None)
    if length is None:
        windows, length = [None] * run.count, 1
    kinds = list(dict.fromkeys(windows))
    own = [tuple(layer for layer, each in zip(layers, windows, strict=True) if each == kind) for kind in kinds]
    parts = tuple(CachePart(*each) for each in zip(own, kinds, strict=True))
    return Turns(parts, tuple(kinds.index(each) for each in windows[:length]))


def cache_parts(arch: Arch) -> list[CachePart]:
    """All parts of a decoder's cache, in their order. Layers that reuse keys and values are in none."""
    return [part for run in arch.runs if not run.kind.reuses for part in turns_of(arch, run).parts]


def _window(arch: Arch, layer: int) -> int | None:
    """How many tokens a layer sees at most; a chunk as long has no more."""
    chunk = None if arch.chunks is None else arch.chunks[layer]
    return arch.windows[layer] if chunk is None else chunk
