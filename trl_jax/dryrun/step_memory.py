"""Memory of a step by arithmetic, which `trl-jax plan` prints next to the compiler's figures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from trl_jax.data.layout.batch import Batch
from trl_jax.dryrun.step_flops import Map, channels_of, keys_of_row
from trl_jax.models.stack import in_a_stack
from trl_jax.nn.attention.padded import QUERY_BLOCK

FLOAT32 = 4


class Memory(NamedTuple):
    """Bytes of one device.

    gradients: twice that where several passes a step are summed. copies: layers' weights in the dtype of computation.
    gathered: one layer's weights, all-gathered over fsdp, and their gradient. kept: activations for the backward pass,
    and what all layers are given.
    working: activations of one layer while it is computed, again and backward. outside: weights outside the layers
    (embedding, head), all-gathered; when they are needed, nothing of the layers is left.
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
        """The most bytes at once."""
        return self.arguments + self.temporary


class StepArguments(NamedTuple):
    """The arguments of a step as shapes with shardings."""

    params: dict[str, jax.ShapeDtypeStruct]
    state: Any
    batch: Batch
    frozen: dict[str, jax.ShapeDtypeStruct]

    @property
    def layers(self) -> list[tuple[str, jax.ShapeDtypeStruct]]:
        return [(path, leaf) for path, leaf in (self.frozen | self.params).items() if in_a_stack(path)]


class Pass(NamedTuple):
    """The (packed) rows that one device computes at once, `[rows, length]`; a step has `passes` of them.

    sharing: devices that divide the heads and channels of these rows. striped: devices that divide their tokens.
    """

    passes: int
    rows: int
    length: int
    sharing: int = 1
    striped: int = 1

    @property
    def tokens(self) -> int:
        """Tokens that this device computes of a pass."""
        return self.rows * self.length // self.striped


def on_device(leaves: Any) -> int:
    """Bytes on one device of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(leaves)
    )


def memory(
    arguments: StepArguments,
    gradients: int,
    one: Pass,
    arch: Any,
    maps: Sequence[Map],
    *,
    dtype: str,
    remat: bool | str,
    platform: str,
) -> Memory:
    """The memory of a step; `gradients` is their bytes on one device, `remat` is as in `models.stack`."""
    width = 2 if dtype == "bfloat16" else FLOAT32
    outputs = outputs_of_layer(maps, arch) // one.sharing  # activations of a token in one layer
    products = one.tokens * outputs * width
    kept = one.tokens * arch.hidden_size * FLOAT32 + (0 if remat else products)
    alone = _weights(arguments.batch, one, arch, width) + (products if remat else 0)  # of a layer not computed again
    outside = {path: leaf for path, leaf in arguments.params.items() if not in_a_stack(path)}
    return _common(arguments, one, arch, maps, width)._replace(
        gradients=gradients * min(one.passes, 2),
        gathered=gathered(arguments, arch, width, gradients=True),
        kept=(2 if remat == "offloaded" else arch.num_layers) * kept  # one on its way out, one on its way in
        + (layers_alone(arch) if platform == "cpu" else 0) * alone
        + 2 * _between_layers(one, arch, width),
        working=2 * (products + _texts(arguments.batch, one, arch, width))
        + _scores(arguments.batch, one, arch, width)
        + _keys(one, arch, width),
        outside=_whole(outside.values()),
    )


def evaluation_memory(arguments: StepArguments, one: Pass, arch: Any, maps: Sequence[Map], *, dtype: str) -> Memory:
    """The memory of a pass of evaluation during training, the optimizer's state included."""
    width = 2 if dtype == "bfloat16" else FLOAT32
    outputs = outputs_of_layer(maps, arch) // one.sharing
    outside = {path: leaf for path, leaf in (arguments.frozen | arguments.params).items() if not in_a_stack(path)}
    return _common(arguments, one, arch, maps, width)._replace(
        gathered=gathered(arguments, arch, width, gradients=False),
        kept=_between_layers(one, arch, width),
        working=one.tokens * outputs * width
        + _texts(arguments.batch, one, arch, width)
        + _block(arguments.batch, one, arch, width)
        + _keys(one, arch, width),
        outside=_whole(outside.values()),
    )


def outputs_of_layer(maps: Sequence[Map], arch: Any) -> int:
    """Numbers that the matrices of a layer give for a token, on the average of all layers."""
    return sum(each.layers * each.used * each.outputs for each in maps) // arch.num_layers


def layers_alone(arch: Any) -> int:
    """Layers whose neighbours are of another kind, so that their scan has one turn. XLA dissolves such a loop, and for
    CPUs finds that what is to be computed again is there, whatever `jax.checkpoint` asks for: of these layers all is
    kept, attention weights too."""
    counts = [run.count for run in arch.runs] if "kinds" in vars(arch) else [arch.num_layers]
    return sum(count == 1 for count in counts)


def _between_layers(one: Pass, arch: Any, width: int) -> int:
    """Bytes of what layers are given beside the residual stream: embeddings of their own, which are made for all of
    them at once, and keys and values that later layers reuse."""
    if "kinds" not in vars(arch):
        return 0
    own = 0 if arch.layer_embedding is None else arch.num_layers * arch.layer_embedding.channels
    heads = [arch.heads_of(kind) for kind in arch.kinds or () if kind.reused]
    reused = sum(2 * each.count * each.channels for each in heads) // one.sharing
    return one.tokens * (own + reused) * width


def _common(arguments: StepArguments, one: Pass, arch: Any, maps: Sequence[Map], width: int) -> Memory:
    """The memory that a step and an evaluation both need; the rest is zero."""
    floats = [leaf for _, leaf in arguments.layers if leaf.dtype == np.float32]
    return Memory(
        parameters=on_device((arguments.params, arguments.frozen)),
        moments=on_device(arguments.state),
        batch=on_device(arguments.batch),
        gradients=0,
        copies=on_device(floats) * width // FLOAT32 if width < FLOAT32 else 0,
        gathered=0,
        kept=0,
        working=0,
        outside=0,
    )


def gathered(arguments: StepArguments, arch: Any, width: int, *, gradients: bool) -> int:
    """Bytes of one layer's sharded weights all-gathered and, of those that train, their gradients."""
    total = 0
    for path, leaf in arguments.layers:
        stored = leaf.dtype.itemsize
        of_each = min(stored, width) + (FLOAT32 if gradients and path in arguments.params else 0)
        total += _whole([leaf]) // stored * of_each
    return total // arch.num_layers


def _whole(leaves: Iterable[Any]) -> int:
    """Bytes of the weights sharded over fsdp, once they are all-gathered."""
    return sum(
        on_device(leaf) * leaf.sharding.mesh.shape["fsdp"]
        for leaf in leaves
        if isinstance(leaf.sharding, NamedSharding) and "fsdp" in leaf.sharding.spec
    )


def _weights(batch: Batch, one: Pass, arch: Any, width: int) -> int:
    """Bytes of one layer's attention weights on padded rows, in float32 and in the dtype of computation. Zero where
    attention runs along packed rows: there only a block exists at once."""
    rows, length = _rows(batch, one)
    heads = rows * arch.num_heads // one.sharing // one.striped
    return heads * keys_of_row(length, causal=True) * (FLOAT32 + width)


def _scores(batch: Batch, one: Pass, arch: Any, width: int) -> int:
    """Bytes of one layer's attention weights on padded rows, and of the gradients of one block."""
    rows, length = _rows(batch, one)
    heads = rows * arch.num_heads // one.sharing // one.striped
    return _weights(batch, one, arch, width) + 2 * heads * QUERY_BLOCK * length * FLOAT32


def _block(batch: Batch, one: Pass, arch: Any, width: int) -> int:
    """Bytes of the scores of one block of queries on padded rows, without a backward pass."""
    rows, length = _rows(batch, one)
    return row_block(rows * arch.num_heads // one.sharing // one.striped, length, width)


def row_block(heads: int, length: int, width: int) -> int:
    """Bytes of the scores of a block of queries of so many rows' heads."""
    return heads * min(QUERY_BLOCK, length) * length * (FLOAT32 + width)


def _rows(batch: Batch, one: Pass) -> tuple[int, int]:
    """Number and length of the rows that attention reads on a device; (0, 0) where it runs along packed rows."""
    if batch.packed is None:
        return one.rows, one.length
    if batch.packed.texts is None:
        return 0, 0
    *_, count, length = batch.packed.texts.places.shape
    return one.rows * count, length


def _texts(batch: Batch, one: Pass, arch: Any, width: int) -> int:
    """Bytes of queries, keys, values and results of one layer, where packed texts are laid out as rows for
    attention."""
    if batch.packed is None or batch.packed.texts is None:
        return 0
    heads = arch.num_heads + arch.num_key_heads
    return 2 * math.prod(_rows(batch, one)) * heads * channels_of(arch) // arch.num_heads // one.sharing * width


def _keys(one: Pass, arch: Any, width: int) -> int:
    """Bytes of one layer's keys and values of all tokens, and their gradients, where tokens are striped over
    devices."""
    if one.striped == 1:
        return 0
    return 4 * one.rows * one.length * arch.num_key_heads // one.sharing * arch.head_dim * width
