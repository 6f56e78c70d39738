"""An evaluation set in windows: within one, pairs are laid out in the order of their length; results in their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trl_jax.data.layout import PairBatch, pad_pairs
from trl_jax.data.loader import Place, PreferenceLoader
from trl_jax.data.streams import Placed, place, stream_pairs

WINDOW = 64  # batches that are sorted together


class EvaluationBatch(NamedTuple):
    """A batch of TRL's: what its loss and metrics need beside the scores; fields as in PairBatch."""

    weight: np.ndarray
    margin: np.ndarray | None
    num_pairs: int


@dataclass
class Window:
    """Some batches, and the passes that compute the scores of their pairs.

    passes: what is computed, and for each of its slots the pair that it has, counted over the window, or -1.
    batches: in the set's order, `batch_size` pairs each but the last.
    rows: which of the set's pairs each batch is.
    """

    passes: list[tuple[PairBatch, np.ndarray]]
    batches: list[EvaluationBatch]
    rows: list[list[int]]
    batch_size: int

    def restored(self, scores: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The scores `[2 * slots]` of each pass as those of each batch, `[2 * batch_size]`."""
        found = np.zeros((2, len(self.batches) * self.batch_size), np.float32)
        for (_, pairs), given in zip(self.passes, scores, strict=True):
            found[:, pairs[pairs >= 0]] = given.reshape(2, -1)[:, pairs >= 0]
        return [part.reshape(-1) for part in np.split(found, len(self.batches), axis=1)]


class Windows:
    """What an evaluation computes: the batches of a loader, a window of them at a time.

    `sort` says whether padded rows may stand beside others than in their own batch. All streams have as many tokens,
    about as many as a batch of pairs has, so that seldom more than one shape compiles.
    """

    def __init__(self, loader: PreferenceLoader, *, sort: bool):
        self._loader, self._sort, self._stream = loader, sort, 0

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
        passes = []
        for start in range(0, len(rows), loader.batch_size):
            pairs = order[start : start + loader.batch_size]
            facts = {"pad_token_id": loader.pad_token_id, "pad_to_multiple_of": loader.pad_to_multiple_of}
            arrays = pad_pairs([[rows[pair] for pair in pairs]], pairs=loader.batch_size, count=1, **facts)
            slots = np.full(loader.batch_size, -1)
            slots[: len(pairs)] = pairs
            passes.append((arrays, slots))
        return passes

    def _streams(self, batches: list[list[dict]]) -> list[tuple[PairBatch, np.ndarray]]:
        loader = self._loader
        size, most = loader.batch_size, 2 * loader.batch_size
        placed = place(batches, pairs=size, share=loader.layout == "shared")
        needed = max(max(pair.tokens for pair in placed), sum(pair.tokens for pair in placed) // len(batches))
        self._stream = max(self._stream, loader.ladder(needed))
        passes = []
        for pairs in _fitting(placed, self._stream, most):
            # Slots count on within the pass, but ropes that ask for the longest text mean that of TRL's batch.
            arrays = stream_pairs(
                [pair._replace(slot=slot) for slot, pair in enumerate(pairs)],
                [0] * len(pairs),
                pairs=most,
                count=1,
                streams=1,
                pad_token_id=loader.pad_token_id,
                rung=lambda _: self._stream,
                beside=[max(map(_longest, batches[pair.slot // size])) for pair in pairs],
            )
            slots = np.full(most, -1)
            slots[: len(pairs)] = [pair.slot for pair in pairs]
            passes.append((arrays, slots))
        return passes


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
