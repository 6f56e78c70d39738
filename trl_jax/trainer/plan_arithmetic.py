"""What a step must hold and compute, by arithmetic: what `trl-jax plan` sets beside the compiler's figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from trl_jax.core.chips import Chip
from trl_jax.data.layout import PairBatch
from trl_jax.engine.ahead import Compiled
from trl_jax.nn.attention import QUERY_BLOCK

_FLOAT32 = 4
LAYERS = ".layers."  # in the path of a parameter that has a leading axis of layers


class Memory(NamedTuple):
    """Bytes of a device.

    gradients: and, with several passes a step, their sum. copies: layers' weights in the dtype of computation.
    gathered: one layer's weights made whole, where they lie in parts, and their gradient. kept: for the backward pass.
    working: one layer, computed again and backward. outside: the gradient of what is no layer, made whole; at the end,
    when nothing of the layers is left.
    """

    parameters: int
    moments: int
    batch: int
    gradients: int
    copies: int
    gathered: int
    kept: int
    working: int
    outside: int

    @property
    def arguments(self) -> int:
        return self.parameters + self.moments + self.batch

    @property
    def activations(self) -> int:
        return self.kept + self.working

    @property
    def temporary(self) -> int:
        return self.gradients + max(self.copies + self.gathered + self.activations, self.outside)

    @property
    def peak(self) -> int:
        return self.arguments + self.temporary


class Pass(NamedTuple):
    """What one device computes at once: so many rows or streams, each so long; `passes` of them are a step.

    `sharing` devices compute the same, each some of its heads and channels; `dealt` devices each some of its tokens.
    """

    passes: int
    rows: int
    length: int
    sharing: int = 1
    dealt: int = 1

    @property
    def tokens(self) -> int:
        """Of the device itself."""
        return self.rows * self.length // self.dealt


def on_device(leaves: Any) -> int:
    """Bytes that a device has of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(leaves)
    )


def memory(
    params: Any, state: Any, batch: PairBatch, gradients: int, one: Pass, arch: Any, *, dtype: str, remat: bool | str
) -> Memory:
    """Of shapes with shardings; `gradients` are a device's bytes of them, `remat` is as in `models.stack`."""
    width = 2 if dtype == "bfloat16" else _FLOAT32
    layers = {path: leaf for path, leaf in params.items() if LAYERS in path}
    given = sum(used * leaf.shape[-2] for leaf, used in _maps(params, arch)) // one.sharing  # a layer's maps' numbers
    kept = one.tokens * arch.hidden_size * _FLOAT32 + (0 if remat else one.tokens * given * width)
    return Memory(
        on_device(params),
        on_device(state),
        on_device(batch),
        gradients * min(one.passes, 2),
        on_device(layers) * width // _FLOAT32 if width < _FLOAT32 else 0,
        _whole(layers) * (width + _FLOAT32) // _FLOAT32 // arch.num_layers,
        (2 if remat == "offloaded" else arch.num_layers) * kept,  # one on its way out, one on its way in
        2 * one.tokens * given * width + _scores(batch, one, arch, width) + _keys(one, arch, width),
        _whole({path: leaf for path, leaf in params.items() if path not in layers}),
    )


def _whole(params: Mapping[str, Any]) -> int:
    """Bytes of weights that lie in parts over fsdp, made whole on it."""
    return sum(
        on_device(leaf) * leaf.sharding.mesh.shape["fsdp"]
        for leaf in params.values()
        if isinstance(leaf.sharding, NamedSharding) and "fsdp" in leaf.sharding.spec
    )


def _scores(batch: PairBatch, one: Pass, arch: Any, width: int) -> int:
    """Of a layer on padded rows all weights of the softmax, in float32 and as they multiply, and gradients of a block;
    along a stream a block is all there is at once."""
    if batch.stream is not None:
        return 0
    heads = one.rows * arch.num_heads // one.sharing // one.dealt
    weights = heads * _held_against(one.length, causal=True)
    return weights * (_FLOAT32 + width) + 2 * heads * QUERY_BLOCK * one.length * _FLOAT32


def _keys(one: Pass, arch: Any, width: int) -> int:
    """Keys and values of one layer where tokens are dealt: of all tokens, and their gradients."""
    if one.dealt == 1:
        return 0
    return 4 * one.rows * one.length * arch.num_key_heads // one.sharing * arch.head_dim * width


def _maps(params: Mapping[str, Any], arch: Any) -> Iterable[tuple[Any, int]]:
    """The stacked weights `[L, out, in]` or, of experts, `[L, E, out, in]`; and how many of these a token sees."""
    for path, leaf in params.items():
        if LAYERS in path and leaf.ndim in (3, 4):
            yield leaf, 1 if leaf.ndim == 3 else arch.experts.top_k


def flops(params: Mapping[str, Any], batch: PairBatch, arch: Any, *, causal: bool, remat: bool | str) -> int:
    """Of a step, on all devices together, in matrix products: two for each weight and token (Kaplan et al. 2020), the
    same for what queries see; twice that backward, and once more where layers are computed again. What queries see
    always is, on rows whole and along streams the scores: no memory is spent on keeping it."""
    weights = sum(used * arch.num_layers * math.prod(leaf.shape[-2:]) for leaf, used in _maps(params, arch))
    forward = 2 * weights * math.prod(batch.tokens.shape)
    attended = 4 * seen(batch, causal) * arch.num_layers * _channels(arch)
    if batch.stream is None:
        return (4 if remat else 3) * forward + 4 * attended
    return (4 if remat else 3) * forward + (9 if remat else 7) * attended // 2


def _channels(arch: Any) -> int:
    """Of all heads of queries together."""
    return arch.hidden_size if "head_dim" not in vars(arch) else arch.num_heads * arch.head_dim


def seen(batch: PairBatch, causal: bool) -> int:
    """How many keys all queries of a step are held against: padded rows in blocks of queries, streams exactly."""
    *rows, length = batch.tokens.shape
    if batch.stream is not None:
        held = np.asarray(batch.stream.end) - np.asarray(batch.stream.first)
        if not causal:  # of n tokens each is held against n, not against those up to itself
            return int(2 * held.sum() - (held > 0).sum())
        return int(held.sum())
    return math.prod(rows) * _held_against(length, causal)


def _held_against(length: int, causal: bool) -> int:
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
