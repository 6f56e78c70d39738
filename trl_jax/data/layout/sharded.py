"""A step's pairs on several devices, as TRL's ranks have them: an equal share of each micro-batch. Pure NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from trl_jax.core.packed import Packed, RowView
from trl_jax.data.layout.batch import PairBatch
from trl_jax.data.layout.packed import Form, Placed, stream_pairs


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


def room(pairs: int, accumulation: int) -> int:
    """Pairs that one of several devices' streams has room for: some more than `pairs`, its share of a micro-batch.

    Without a bound each stream would be read at as many places as all pairs of the step have.
    """
    return (accumulation + 1) * pairs


def sharded_streams(
    placed: Sequence[Placed], into: Sequence[int], form: Form, *, pairs: int, count: int, shards: int
) -> PairBatch:
    """Pairs as streams, `[count, shards, 1, T]`: pass by pass, one for each shard.

    Args:
        placed: of `by_shard`'s runs, `pairs` each; slots are counted over all of them.
        into: the stream of each, counted over passes and shards.
        form: as `stream_pairs` takes it.
    """
    longest: dict[int, int] = {}
    for pair in placed:
        longest[pair.slot // pairs] = max(longest.get(pair.slot // pairs, 0), pair.longest)
    most, streams = room(pairs, count), count * shards
    member, own = np.zeros((streams, count, most), bool), []
    taken = [0] * streams
    for pair, stream in zip(placed, into, strict=True):
        slot, taken[stream] = taken[stream], taken[stream] + 1
        member[stream, pair.slot // (pairs * shards), slot] = True
        own.append(pair._replace(slot=slot))
    beside = [longest[pair.slot // pairs] for pair in placed]
    batch = stream_pairs(own, into, form, pairs=most, count=1, streams=streams, beside=beside)
    return in_shards(batch._replace(member=member), shards)


def sharded_rows(batch: PairBatch, shards: int) -> PairBatch:
    """Padded micro-batches of `by_shard`, `[count x shards, ...]`, as `[count, shards, ...]`."""
    passes, _, pairs = batch.member.shape
    member = batch.member.reshape(passes, passes // shards, shards, pairs).any(axis=2)
    return in_shards(batch._replace(member=member), shards)


def in_shards(batch: PairBatch, shards: int) -> PairBatch:
    """`[n x shards, ...]` as `[n, shards, ...]`."""

    def split(leaf: np.ndarray | None) -> np.ndarray | None:
        return None if leaf is None else leaf.reshape(-1, shards, *leaf.shape[1:])

    stream = batch.packed
    if stream is not None:
        texts = None if stream.texts is None else RowView(*map(split, stream.texts))
        stream = Packed(*map(split, stream[:-1]), texts)
    return PairBatch(*map(split, batch[:-1]), stream)
