"""An evaluation set in windows: within one, examples are laid out by length; results come in their own order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trl_jax.data.example import Example, Measured, measured
from trl_jax.data.layout.batch import Batch
from trl_jax.data.layout.packed import Form, Placed, RowViewShape, longest_beside, pack_examples, place
from trl_jax.data.layout.padded import pad_examples
from trl_jax.data.loader import ExampleLoader, Visited

WINDOW = 64  # batches that are sorted together


@dataclass
class Window:
    """Some batches, and the passes that compute the outputs of their examples.

    passes: what is computed, and for each of its slots the example that it has, counted over the window, or -1; on
        several devices both have an axis of shards in front.
    batches: in the set's order, `batch_size` examples each but the last.
    rows: which of the set's rows each batch is.
    """

    passes: list[tuple[Batch, np.ndarray]]
    batches: list[Measured]
    rows: list[list[int]]
    batch_size: int

    def restored(self, outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs of each pass, `[X]` or `[shards, X]`, as those of each batch, `[texts * batch_size]`."""
        texts = outputs[0].shape[-1] // self.passes[0][1].shape[-1]
        found = np.zeros((texts, len(self.batches) * self.batch_size), np.float32)
        for (_, examples), given in zip(self.passes, outputs, strict=True):
            by_text = np.moveaxis(given.reshape(*examples.shape[:-1], texts, -1), -2, 0)
            found[:, examples[examples >= 0]] = by_text[:, examples >= 0]
        return [part.reshape(-1) for part in np.split(found, len(self.batches), axis=1)]


class Windows:
    """The passes of an evaluation: the batches of a loader, a window of them at a time.

    `sort` says whether padded rows may stand beside others than in their own batch. All packed rows have as many
    tokens, about as many as a batch has, so that seldom more than one shape compiles.
    """

    def __init__(self, loader: ExampleLoader, *, sort: bool):
        self._loader, self._sort, self._packed, self._text = loader, sort, 0, 0

    def __iter__(self) -> Iterator[Window]:
        gathered = []
        for group in self._loader.groups():
            gathered += group
            if len(gathered) == WINDOW:
                yield self._window(gathered)
                gathered = []
        if gathered:
            yield self._window(gathered)

    def _window(self, visited: list[list[Visited]]) -> Window:
        loader, batches = self._loader, [[one.example for one in batch] for batch in visited]
        rows = [[one.index for one in batch] for batch in visited]
        passes = self._padded_passes(batches) if loader.layout == "padded" else self._packed_passes(batches)
        return Window(passes, [measured(batch, loader.batch_size) for batch in batches], rows, loader.batch_size)

    def _padded_passes(self, batches: list[list[Example]]) -> list[tuple[Batch, np.ndarray]]:
        loader, examples = self._loader, [example for batch in batches for example in batch]
        longest = [-example.longest for example in examples]
        order = np.argsort(longest, kind="stable") if self._sort else np.arange(len(examples))
        passes, size = [], self._share
        for start in range(0, len(examples), loader.batch_size):
            own = order[start : start + loader.batch_size]
            shares = [own[at : at + size] for at in range(0, len(own), size)]
            padding = {"pad_token_id": loader.pad_token_id, "pad_to_multiple_of": loader.pad_to_multiple_of}
            given = [[examples[number] for number in share] for share in shares]
            arrays = pad_examples(given, examples=size, count=loader.shards, **padding)
            slots = np.full(loader.batch_size, -1)
            slots[: len(own)] = own
            passes.append((arrays, self._by_shard(slots)))
        return passes

    def _packed_passes(self, batches: list[list[Example]]) -> list[tuple[Batch, np.ndarray]]:
        loader, shards = self._loader, self._loader.shards
        most = 2 * self._share
        placed = place(batches, examples=loader.batch_size, share=loader.layout == "shared")
        least = sum(one.tokens for one in placed) // (len(batches) * shards)
        self._packed = max(self._packed, loader.buckets(max(least, *(one.tokens for one in placed))))
        if loader.views is not None:
            _, text = loader.views(self._packed, max(one.example.longest for one in placed))
            self._text = max(self._text, text)
        # Ropes that ask for the longest text mean that of the share of a batch that one of TRL's ranks has.
        beside = dict(zip((one.slot for one in placed), longest_beside(placed, self._share), strict=True))
        fitting = _fitting(placed, self._packed, most)
        return [self._pass(fitting[at : at + shards], most, beside) for at in range(0, len(fitting), shards)]

    def _pass(self, rows: list[list[Placed]], most: int, beside: dict[int, int]) -> tuple[Batch, np.ndarray]:
        loader = self._loader
        view = None if loader.views is None else RowViewShape(most, lambda *_: (self._packed, self._text))
        arrays = pack_examples(
            [one._replace(slot=slot) for own in rows for slot, one in enumerate(own)],
            [row for row, own in enumerate(rows) for _ in own],
            Form(loader.pad_token_id, loader.layout == "shared", lambda _: self._packed, view),
            examples=most,
            count=1,
            rows=loader.shards,
            beside=[beside[one.slot] for own in rows for one in own],
        )
        slots = np.full((loader.shards, most), -1)
        for row, own in enumerate(rows):
            slots[row, : len(own)] = [one.slot for one in own]
        return arrays, self._by_shard(slots)

    @property
    def _share(self) -> int:
        """A shard's examples of a batch."""
        return self._loader.batch_size // self._loader.shards

    def _by_shard(self, slots: np.ndarray) -> np.ndarray:
        return slots.reshape(-1) if self._loader.shards == 1 else slots.reshape(self._loader.shards, -1)


def _fitting(placed: list[Placed], length: int, most: int) -> list[list[Placed]]:
    """Packed rows of at most `length` tokens and `most` examples: the longest first, each where it first fits."""
    rows, left = [], []
    for one in sorted(placed, key=lambda one: -one.tokens):
        fits = (i for i, room in enumerate(left) if room >= one.tokens and len(rows[i]) < most)
        at = next(fits, len(rows))
        if at == len(rows):
            rows.append([])
            left.append(length)
        rows[at].append(one)
        left[at] -= one.tokens
    return rows
