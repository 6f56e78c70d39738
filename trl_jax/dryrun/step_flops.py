"""What a step must compute, by arithmetic: what `trl-jax plan` sets beside the compiler's figures."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trl_jax.core.chips import Chip
from trl_jax.data.layout.batch import Batch
from trl_jax.dryrun.compiler import Compiled
from trl_jax.nn.attention.padded import QUERY_BLOCK

LAYERS = ".layers."  # in the path of a parameter that has a leading axis of layers


class Map(NamedTuple):
    """One of the matrices of each layer; a token goes through it `used` times, through that many experts'."""

    outputs: int
    inputs: int
    used: int
    trains: bool


def maps_of(shapes: Mapping[str, Any], arch: Any, trained: Collection[str]) -> list[Map]:
    """The stacked weights `[L, out, in]` or, of experts, `[L, E, out, in]` among these, by path."""
    found = [(path, leaf) for path, leaf in shapes.items() if LAYERS in path and leaf.ndim in (3, 4)]
    return [
        Map(*leaf.shape[-2:], 1 if leaf.ndim == 3 else arch.experts.top_k, path in trained) for path, leaf in found
    ]


def flops(maps: Sequence[Map], batch: Batch, arch: Any, *, causal: bool, remat: bool | str) -> int:
    """Of a step, on all devices together, in matrix products: two for each weight and token (Kaplan et al. 2020), the
    same for what queries see; twice that backward, or once for weights that stay as they are; and once more where
    layers are computed again. What queries see always is, on rows whole and along streams the scores: no memory is
    spent on keeping it."""
    times = sum(((3 if each.trains else 2) + bool(remat)) * each.used * each.outputs * each.inputs for each in maps)
    forward = 2 * times * arch.num_layers * math.prod(batch.tokens.shape)
    attended = 4 * seen(batch, causal) * arch.num_layers * channels_of(arch)
    if batch.packed is None:
        return forward + 4 * attended
    return forward + (9 if remat else 7) * attended // 2


def channels_of(arch: Any) -> int:
    """Of all heads of queries together."""
    return arch.hidden_size if "head_dim" not in vars(arch) else arch.num_heads * arch.head_dim


def seen(batch: Batch, causal: bool) -> int:
    """How many keys all queries of a step are held against: padded rows in blocks of queries, streams exactly."""
    *rows, length = batch.tokens.shape
    if batch.packed is not None:
        held = np.asarray(batch.packed.end) - np.asarray(batch.packed.first)
        if not causal:  # of n tokens each is held against n, not against those up to itself
            return int(2 * held.sum() - (held > 0).sum())
        return int(held.sum())
    return math.prod(rows) * held_against(length, causal)


def held_against(length: int, causal: bool) -> int:
    """How many keys the queries of one row are held against, block by block."""
    ends = [min(start + QUERY_BLOCK, length) for start in range(0, length, QUERY_BLOCK)]
    return sum((end - start) * (end if causal else length) for start, end in zip([0, *ends], ends, strict=False))


class Bound(NamedTuple):
    """Seconds that a step takes at least on each of a chip's parts, by its published figures."""

    compute: float
    memory: float
    links: float

    @property
    def step(self) -> float:
        return max(self)


def bound(chip: Chip, compiled: Compiled, outputs: int) -> Bound:
    """Every product at the peak in bfloat16; every argument read once, every result written once, and every temporary
    byte both; all collectives over all links at once, one direction each."""
    moved = compiled.arguments + outputs + 2 * compiled.temporary
    sent = sum(one.sent for one in compiled.cost.collectives)
    return Bound(compiled.cost.flops / chip.flops, moved / chip.bandwidth, sent / (chip.links / 2))
