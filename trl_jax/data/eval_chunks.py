"""Chunks of an evaluation set: within one, examples are laid out by length; their outputs are put back in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from trl_jax.data.example import Example, LossBatch, loss_batch
from trl_jax.data.layout.batch import Batch
from trl_jax.data.layout.packed import PackingSpec, pack_examples
from trl_jax.data.layout.padded import pad_examples
from trl_jax.data.layout.placing import Placed, longest_in_batch, place
from trl_jax.data.layout.row_view import RowViewShape
from trl_jax.data.loader import ExampleLoader
from trl_jax.data.step_layout import IndexedExample

CHUNK_BATCHES = 64  # batches in a chunk


@dataclass
class EvalChunk:
    """Some batches, and the passes that compute the outputs of their examples.

    passes: the arrays to compute on, and for each of their slots the number of its example within the chunk, or -1 for
        padding; on several devices both have a leading axis of shards.
    batches: in the set's order, `batch_size` examples each except the last.
    rows: indices of each batch's rows in the set.
    """

    passes: list[tuple[Batch, np.ndarray]]
    batches: list[LossBatch]
    rows: list[list[int]]
    batch_size: int

    def restored(self, outputs: Sequence[Any]) -> list[Any]:
        """Reorder outputs by pass to outputs by batch.

        Args:
            outputs: of each pass, float32 `[X]` or `[shards, X]`, or such arrays by name.

        Returns:
            Of each batch `[texts * batch_size]`, or such arrays by name.
        """
        if not isinstance(outputs[0], dict):
            return self._restored(outputs)
        by_name = {name: self._restored([output[name] for output in outputs]) for name in outputs[0]}
        return [{name: parts[number] for name, parts in by_name.items()} for number in range(len(self.batches))]

    def _restored(self, outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        texts = outputs[0].shape[-1] // self.passes[0][1].shape[-1]
        restored = np.zeros((texts, len(self.batches) * self.batch_size), np.float32)
        for (_, examples), output in zip(self.passes, outputs, strict=True):
            by_text = np.moveaxis(output.reshape(*examples.shape[:-1], texts, -1), -2, 0)
            restored[:, examples[examples >= 0]] = by_text[:, examples >= 0]
        return [part.reshape(-1) for part in np.split(restored, len(self.batches), axis=1)]


class EvalChunks:
    """Iterates over the batches of a loader, a chunk of them at a time.

    sort: whether padded rows may be batched with rows of other batches; False where a model's numbers depend on that.
    whole: whether each pass has the examples of one batch, on several devices each one's part of it.

    All packed rows get the same length, about the tokens of a batch, so that rarely more than one shape compiles.
    """

    def __init__(self, loader: ExampleLoader, *, sort: bool, whole: bool = False):
        self._loader, self._layout = loader, loader.step_layout
        self._sort, self._whole = sort and not whole, whole
        self._packed = self._text = 0  # lengths of packed rows and of their longest texts

    def __iter__(self) -> Iterator[EvalChunk]:
        gathered = []
        for group in self._loader.groups():
            gathered += group
            if len(gathered) == CHUNK_BATCHES:
                yield self._chunk(gathered)
                gathered = []
        if gathered:
            yield self._chunk(gathered)

    def _chunk(self, indexed: list[list[IndexedExample]]) -> EvalChunk:
        layout, batches = self._layout, [[one.example for one in batch] for batch in indexed]
        rows = [[one.index for one in batch] for batch in indexed]
        passes = self._padded_passes(batches) if layout.layout == "padded" else self._packed_passes(batches)
        per_token = layout.weighting != "examples"
        parts = [loss_batch(batch, layout.batch_size, per_token=per_token) for batch in batches]
        return EvalChunk(passes, parts, rows, layout.batch_size)

    def _padded_passes(self, batches: list[list[Example]]) -> list[tuple[Batch, np.ndarray]]:
        layout, examples = self._layout, [example for batch in batches for example in batch]
        longest = [-example.longest for example in examples]
        order = np.argsort(longest, kind="stable") if self._sort else np.arange(len(examples))
        passes, size = [], self._share
        for start in range(0, len(examples), layout.batch_size):
            numbers = order[start : start + layout.batch_size]
            shares = [numbers[at : at + size] for at in range(0, len(numbers), size)]
            padding = {"pad_token_id": layout.pad_token_id, "pad_to_multiple_of": layout.pad_to_multiple_of}
            by_share = [[examples[number] for number in share] for share in shares]
            arrays = pad_examples(by_share, examples=size, count=layout.shards, **padding)
            slots = np.full(layout.batch_size, -1)
            slots[: len(numbers)] = numbers
            passes.append((arrays, self._by_shard(slots)))
        return passes

    def _packed_passes(self, batches: list[list[Example]]) -> list[tuple[Batch, np.ndarray]]:
        layout, shards = self._layout, self._layout.shards
        max_examples = self._share if self._whole else 2 * self._share
        placed = place(batches, examples=layout.batch_size, share_prefix=layout.layout == "shared")
        parts = _parts(placed, self._share) if self._whole else None
        self._packed = max(self._packed, layout.buckets(self._tokens(placed, parts, len(batches))))
        if layout.views is not None:
            _, text = layout.views(self._packed, max(one.example.longest_document for one in placed))
            self._text = max(self._text, text)
        # Rotary embeddings that depend on the longest text use that of the batch of one of TRL's ranks.
        longest = dict(zip((one.slot for one in placed), longest_in_batch(placed, self._share), strict=True))
        fitting = _fitting(placed, self._packed, max_examples) if parts is None else parts
        return [self._pass(fitting[at : at + shards], max_examples, longest) for at in range(0, len(fitting), shards)]

    def _pass(self, rows: list[list[Placed]], max_examples: int, longest: dict[int, int]) -> tuple[Batch, np.ndarray]:
        layout = self._layout
        view = None if layout.views is None else RowViewShape(max_examples, lambda *_: (self._packed, self._text))
        arrays = pack_examples(
            [one._replace(slot=slot) for row in rows for slot, one in enumerate(row)],
            [number for number, row in enumerate(rows) for _ in row],
            PackingSpec(layout.pad_token_id, layout.layout == "shared", lambda _: self._packed, view),
            examples=max_examples,
            count=1,
            rows=layout.shards,
            longest_texts=[longest[one.slot] for row in rows for one in row],
        )
        slots = np.full((layout.shards, max_examples), -1)
        for number, row in enumerate(rows):
            slots[number, : len(row)] = [one.slot for one in row]
        return arrays, self._by_shard(slots)

    def _tokens(self, placed: list[Placed], parts: list[list[Placed]] | None, batches: int) -> int:
        """The tokens that a packed row has to have room for: of the largest of the parts, else of an average batch."""
        if parts is not None:
            return max(sum(one.tokens for one in part) for part in parts)
        mean = sum(one.tokens for one in placed) // (batches * self._layout.shards)
        return max(mean, *(one.tokens for one in placed))

    @property
    def _share(self) -> int:
        """Number of examples of a batch on each shard."""
        return self._layout.batch_size // self._layout.shards

    def _by_shard(self, slots: np.ndarray) -> np.ndarray:
        return slots.reshape(-1) if self._layout.shards == 1 else slots.reshape(self._layout.shards, -1)


def _parts(placed: list[Placed], size: int) -> list[list[Placed]]:
    """The examples of each run of `size` slots."""
    return [list(part) for _, part in groupby(placed, key=lambda one: one.slot // size)]


def _fitting(placed: list[Placed], length: int, max_examples: int) -> list[list[Placed]]:
    """Packed rows of at most `length` tokens and `max_examples` examples: first fit, the longest first."""
    rows, left = [], []
    for one in sorted(placed, key=lambda one: -one.tokens):
        fits = (i for i, room in enumerate(left) if room >= one.tokens and len(rows[i]) < max_examples)
        at = next(fits, len(rows))
        if at == len(rows):
            rows.append([])
            left.append(length)
        rows[at].append(one)
        left[at] -= one.tokens
    return rows
