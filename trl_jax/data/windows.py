"""An evaluation set in windows: within one, pairs are laid out in the order of their length; results in their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trl_jax.data.layout.batch import PairBatch, pad_pairs
from trl_jax.data.layout.packed import Form, Placed, Rows, place, stream_pairs
from trl_jax.data.loader import Place, PreferenceLoader

WINDOW = 64  # batches that are sorted together


class EvaluationBatch(NamedTuple):
    """A batch of TRL's: what its loss and metrics need beside the scores; fields as in PairBatch."""

    weight: np.ndarray
    margin: np.ndarray | None
    num_pairs: int


@dataclass
class Window:
    """Some batches, and the passes that compute the scores of their pairs.

    passes: what is computed, and for each of its slots the pair that it has, counted over the window, or -1; on several
        devices both have an axis of shards in front.
    batches: in the set's order, `batch_size` pairs each but the last.
    rows: which of the set's pairs each batch is.
    """

    passes: list[tuple[PairBatch, np.ndarray]]
    batches: list[EvaluationBatch]
    rows: list[list[int]]
    batch_size: int

    def restored(self, scores: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The scores of each pass, `[2 * slots]` or `[shards, 2 * slots]`, as those of each batch, `[2 * pairs]`."""
        found = np.zeros((2, len(self.batches) * self.batch_size), np.float32)
        for (_, pairs), given in zip(self.passes, scores, strict=True):
            sides = np.moveaxis(given.reshape(*pairs.shape[:-1], 2, -1), -2, 0)
            found[:, pairs[pairs >= 0]] = sides[:, pairs >= 0]
        return [part.reshape(-1) for part in np.split(found, len(self.batches), axis=1)]


class Windows:
    """What an evaluation computes: the batches of a loader, a window of them at a time.

    `sort` says whether padded rows may stand beside others than in their own batch. All streams have as many tokens,
    about as many as a batch of pairs has, so that seldom more than one shape compiles.
    """

    def __init__(self, loader: PreferenceLoader, *, sort: bool):
        self._loader, self._sort, self._stream, self._text = loader, sort, 0, 0

    def __iter__(self) -> Iterator[Window]:
        gathered = []
        for group in self._loader.groups():
            gathered += group
            if len(gathered) == WINDOW:
                yield self._window(gathered)
                gathered = []
        if gathered:
            yield self._window(gathered)

    def _window(self, places: list[list[Place]]) -> Window:
        loader, batches = self._loader, [[place.row for place in batch] for batch in places]
        rows = [[place.index for place in batch] for batch in places]
        passes = self._padded(batches) if loader.layout == "padded" else self._streams(batches)
        return Window(passes, [_facts(batch, loader.batch_size) for batch in batches], rows, loader.batch_size)

    def _padded(self, batches: list[list[dict]]) -> list[tuple[PairBatch, np.ndarray]]:
        loader, rows = self._loader, [row for batch in batches for row in batch]
        order = np.argsort([-_longest(row) for row in rows], kind="stable") if self._sort else np.arange(len(rows))
        passes, size = [], self._pairs
        for start in range(0, len(rows), loader.batch_size):
            pairs = order[start : start + loader.batch_size]
            shares = [pairs[at : at + size] for at in range(0, len(pairs), size)]
            facts = {"pad_token_id": loader.pad_token_id, "pad_to_multiple_of": loader.pad_to_multiple_of}
            given = [[rows[pair] for pair in share] for share in shares]
            arrays = pad_pairs(given, pairs=size, count=loader.shards, **facts)
            slots = np.full(loader.batch_size, -1)
            slots[: len(pairs)] = pairs
            passes.append((arrays, self._by_shard(slots)))
        return passes

    def _streams(self, batches: list[list[dict]]) -> list[tuple[PairBatch, np.ndarray]]:
        loader, shards = self._loader, self._loader.shards
        size, most = self._pairs, 2 * self._pairs
        placed = place(batches, pairs=loader.batch_size, share=loader.layout == "shared")
        least = sum(pair.tokens for pair in placed) // (len(batches) * shards)
        self._stream = max(self._stream, loader.buckets(max(least, *(pair.tokens for pair in placed))))
        if loader.shapes is not None:
            _, text = loader.shapes(self._stream, max(pair.longest for pair in placed))
            self._text = max(self._text, text)
        # Ropes that ask for the longest text mean that of the share of a batch that one of TRL's ranks has.
        beside = [max(map(_longest, batch[at : at + size])) for batch in batches for at in range(0, len(batch), size)]
        fitting = _fitting(placed, self._stream, most)
        return [
            self._pass(fitting[at : at + shards], most, beside)
            for at in range(0, len(fitting), shards)
        ]

    def _pass(self, streams: list[list[Placed]], most: int, beside: list[int]) -> tuple[PairBatch, np.ndarray]:
        loader, size = self._loader, self._pairs
        rows = None if loader.shapes is None else Rows(most, lambda *_: (self._stream, self._text))
        arrays = stream_pairs(
            [pair._replace(slot=slot) for pairs in streams for slot, pair in enumerate(pairs)],
            [stream for stream, pairs in enumerate(streams) for _ in pairs],
            Form(loader.pad_token_id, loader.layout == "shared", lambda _: self._stream, rows),
            pairs=most,
            count=1,
            streams=loader.shards,
            beside=[beside[pair.slot // size] for pairs in streams for pair in pairs],
        )
        slots = np.full((loader.shards, most), -1)
        for stream, pairs in enumerate(streams):
            slots[stream, : len(pairs)] = [pair.slot for pair in pairs]
        return arrays, self._by_shard(slots)

    @property
    def _pairs(self) -> int:
        """A shard's of a batch."""
        return self._loader.batch_size // self._loader.shards

    def _by_shard(self, slots: np.ndarray) -> np.ndarray:
        return slots.reshape(-1) if self._loader.shards == 1 else slots.reshape(self._loader.shards, -1)


def _fitting(placed: list[Placed], length: int, most: int) -> list[list[Placed]]:
    """Streams of at most `length` tokens and `most` pairs: the longest first, each where it first fits."""
    streams, left = [], []
    for pair in sorted(placed, key=lambda pair: -pair.tokens):
        fits = (i for i, room in enumerate(left) if room >= pair.tokens and len(streams[i]) < most)
        at = next(fits, len(streams))
        if at == len(streams):
            streams.append([])
            left.append(length)
        streams[at].append(pair)
        left[at] -= pair.tokens
    return streams


def _facts(rows: list[dict], size: int) -> EvaluationBatch:
    weight = np.zeros(size, np.float32)
    weight[: len(rows)] = 1 / len(rows)
    margin = None
    if "margin" in rows[0]:
        margin = np.zeros(size, np.float32)
        margin[: len(rows)] = [row["margin"] for row in rows]
    return EvaluationBatch(weight, margin, len(rows))


def _longest(row: dict) -> int:
    return max(len(row["chosen_ids"]), len(row["rejected_ids"]))
