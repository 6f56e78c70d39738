"""What a step must hold, by arithmetic: what `trl-jax plan` sets beside the compiler's figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from trl_jax.data.layout.batch import Batch
from trl_jax.dryrun.step_flops import LAYERS, Map, channels_of, held_against
from trl_jax.nn.attention.padded import QUERY_BLOCK

_FLOAT32 = 4


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


class Given(NamedTuple):
    """What a step is called with: shapes, each with the places where its array would lie."""

    params: dict[str, jax.ShapeDtypeStruct]
    state: Any
    batch: Batch
    frozen: dict[str, jax.ShapeDtypeStruct]

    @property
    def layers(self) -> list[tuple[str, jax.ShapeDtypeStruct]]:
        return [(path, leaf) for path, leaf in (self.frozen | self.params).items() if LAYERS in path]


class Pass(NamedTuple):
    """What one device computes at once: so many rows or streams, each so long; `passes` of them are a step.

    `sharing` devices compute the same, each some of its heads and channels; `dealt` devices each some of its tokens.
    """

    passes: int
    rows: int
    length: int
    sharing: int = 1
    striped: int = 1

    @property
    def tokens(self) -> int:
        """Of the device itself."""
        return self.rows * self.length // self.striped


def on_device(leaves: Any) -> int:
    """Bytes that a device has of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(leaves)
    )


def memory(
    given: Given, gradients: int, one: Pass, arch: Any, maps: Sequence[Map], *, dtype: str, remat: bool | str
) -> Memory:
    """Of a step; `gradients` are a device's bytes of them, `remat` is as in `models.stack`."""
    width = 2 if dtype == "bfloat16" else _FLOAT32
    outputs = sum(each.used * each.outputs for each in maps) // one.sharing  # a layer's maps' numbers, of a token
    kept = one.tokens * arch.hidden_size * _FLOAT32 + (0 if remat else one.tokens * outputs * width)
    outside = {path: leaf for path, leaf in given.params.items() if LAYERS not in path}
    return _held(given, one, arch, maps, width)._replace(
        gradients=gradients * min(one.passes, 2),
        gathered=_gathered(given, arch, width, gradients=True),
        kept=(2 if remat == "offloaded" else arch.num_layers) * kept,  # one on its way out, one on its way in
        working=2 * (one.tokens * outputs * width + _texts(given.batch, one, arch, width))
        + _scores(given.batch, one, arch, width)
        + _keys(one, arch, width),
        outside=_whole(outside.values()),
    )


def evaluation_memory(given: Given, one: Pass, arch: Any, maps: Sequence[Map], *, dtype: str) -> Memory:
    """Of a pass of evaluation, beside which the optimizer's state waits."""
    width = 2 if dtype == "bfloat16" else _FLOAT32
    outputs = sum(each.used * each.outputs for each in maps) // one.sharing
    outside = {path: leaf for path, leaf in (given.frozen | given.params).items() if LAYERS not in path}
    return _held(given, one, arch, maps, width)._replace(
        gathered=_gathered(given, arch, width, gradients=False),
        working=one.tokens * outputs * width
        + _texts(given.batch, one, arch, width)
        + _block(given.batch, one, arch, width)
        + _keys(one, arch, width),
        outside=_whole(outside.values()),
    )


def _held(given: Given, one: Pass, arch: Any, maps: Sequence[Map], width: int) -> Memory:
    """What a step and an evaluation have alike."""
    floats = [leaf for _, leaf in given.layers if leaf.dtype == np.float32]
    return Memory(
        parameters=on_device((given.params, given.frozen)),
        moments=on_device(given.state),
        batch=on_device(given.batch),
        gradients=0,
        copies=on_device(floats) * width // _FLOAT32 if width < _FLOAT32 else 0,
        gathered=0,
        kept=0,
        working=0,
        outside=0,
    )


def _gathered(given: Given, arch: Any, width: int, *, gradients: bool) -> int:
    """One layer's weights that lie in parts, and of those that train their gradients."""
    total = 0
    for path, leaf in given.layers:
        held = leaf.dtype.itemsize
        of_each = min(held, width) + (_FLOAT32 if gradients and path in given.params else 0)
        total += _whole([leaf]) // held * of_each
    return total // arch.num_layers


def _whole(leaves: Iterable[Any]) -> int:
    """Bytes of weights that lie in parts over fsdp, made whole on it."""
    return sum(
        on_device(leaf) * leaf.sharding.mesh.shape["fsdp"]
        for leaf in leaves
        if isinstance(leaf.sharding, NamedSharding) and "fsdp" in leaf.sharding.spec
    )


def _scores(batch: Batch, one: Pass, arch: Any, width: int) -> int:
    """Of a layer on rows all weights of the softmax, in float32 and as they multiply, and gradients of a block; along a
    stream a block is all there is at once."""
    rows, length = _rows(batch, one)
    heads = rows * arch.num_heads // one.sharing // one.striped
    weights = heads * held_against(length, causal=True)
    return weights * (_FLOAT32 + width) + 2 * heads * QUERY_BLOCK * length * _FLOAT32


def _block(batch: Batch, one: Pass, arch: Any, width: int) -> int:
    """Without a backward pass, what a block of queries on rows is held against."""
    rows, length = _rows(batch, one)
    heads = rows * arch.num_heads // one.sharing // one.striped
    return heads * min(QUERY_BLOCK, length) * length * (_FLOAT32 + width)


def _rows(batch: Batch, one: Pass) -> tuple[int, int]:
    """How many rows attention reads on a device, and how long they are; none along a stream."""
    if batch.packed is None:
        return one.rows, one.length
    if batch.packed.texts is None:
        return 0, 0
    *_, count, length = batch.packed.texts.places.shape
    return one.rows * count, length


def _texts(batch: Batch, one: Pass, arch: Any, width: int) -> int:
    """Queries, keys, values and results of one layer, where a stream's texts are laid out as rows."""
    if batch.packed is None or batch.packed.texts is None:
        return 0
    heads = arch.num_heads + arch.num_key_heads
    return 2 * math.prod(_rows(batch, one)) * heads * channels_of(arch) // arch.num_heads // one.sharing * width


def _keys(one: Pass, arch: Any, width: int) -> int:
    """Keys and values of one layer where tokens are dealt: of all tokens, and their gradients."""
    if one.striped == 1:
        return 0
    return 4 * one.rows * one.length * arch.num_key_heads // one.sharing * arch.head_dim * width
