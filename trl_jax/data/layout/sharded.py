"""A step's examples on several devices, as TRL's ranks have them: an equal share of each micro-batch. Pure NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from trl_jax.data.layout.batch import Batch
from trl_jax.data.layout.packed import PackingSpec, pack_examples
from trl_jax.data.layout.placing import Placed, longest_in_batch


def filled(order: np.ndarray, size: int) -> np.ndarray:
    """The order of an epoch, begun again at its end until `size` divides it: accelerate's `even_batches`."""
    return np.concatenate([order, np.resize(order, -len(order) % size)])


def by_shard(micro_batches: Sequence[Sequence[Any]], shards: int) -> list[list[Any]]:
    """Each micro-batch as `shards` runs, one behind the other; where it does not come out even, the first have one item
    more, and there may be none for the last."""
    runs = []
    for items in micro_batches:
        ends = [(shard * len(items) + shards - 1) // shards for shard in range(shards + 1)]
        runs += [list(items[start:end]) for start, end in itertools.pairwise(ends)]
    return runs


def room(examples: int, accumulation: int) -> int:
    """Examples that one of several devices' packed rows has room for: some more than `examples`, its share of a
    micro-batch.

    Without a bound each packed row would be read at as many places as all examples of the step have.
    """
    return (accumulation + 1) * examples


def packed_passes(
    placed: Sequence[Placed],
    into: Sequence[int],
    spec: PackingSpec,
    *,
    examples: int,
    count: int,
    shards: int,
    most: int,
) -> Batch:
    """Examples as packed rows, `[count x shards, 1, T]`, each with a slot for `most` examples: pass by pass, one for
    each shard.

    Args:
        placed: of `by_shard`'s runs, `examples` each; slots are counted over all of them.
        into: the packed row of each, counted over passes and shards.
        spec: as `pack_examples` takes it.
    """
    rows = count * shards
    member, own = np.zeros((rows, count, most), bool), []
    taken = [0] * rows
    for one, row in zip(placed, into, strict=True):
        slot, taken[row] = taken[row], taken[row] + 1
        member[row, one.slot // (examples * shards), slot] = True
        own.append(one._replace(slot=slot))
    longest_texts = longest_in_batch(placed, examples)
    batch = pack_examples(own, into, spec, examples=most, count=1, rows=rows, longest_texts=longest_texts)
    return batch._replace(micro_batch=member)


def sharded_rows(batch: Batch, shards: int) -> Batch:
    """Padded micro-batches of `by_shard`, `[count x shards, ...]`, as `[count, shards, ...]`."""
    passes, _, examples = batch.micro_batch.shape
    member = batch.micro_batch.reshape(passes, passes // shards, shards, examples).any(axis=2)
    return in_shards(batch._replace(micro_batch=member), shards)


def in_shards(batch: Batch, shards: int) -> Batch:
    """`[n x shards, ...]` as `[n, shards, ...]`."""

    def split(leaf: Any) -> Any:
        if isinstance(leaf, dict):
            return {name: split(values) for name, values in leaf.items()}
        if isinstance(leaf, tuple):
            return type(leaf)(*map(split, leaf))
        return None if leaf is None else leaf.reshape(-1, shards, *leaf.shape[1:])

    return split(batch)


def pass_weights(real: np.ndarray) -> np.ndarray:
    """The share of each example in the mean over passes of means over their examples, float32 `[..., E]`.

    Args:
        real: bool `[..., E]`, which examples of each pass are real; a pass without any does not count.
    """
    examples = real.sum(axis=-1, keepdims=True)
    return (real / np.maximum(examples, 1) / np.count_nonzero(examples)).astype(np.float32)
