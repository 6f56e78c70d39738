"""Prompt samplers of online training, with the same order of prompts as TRL."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np
from datasets import IterableDataset

from trl_jax.core.torch_random import GeneratorState, TorchGenerator


class Sampler(Protocol):
    """Yields the prompts of each micro-batch, epoch by epoch."""

    num_chunks: int | None  # per epoch; None if unknown

    def begin(self, epoch: int = 0) -> None:
        """Rewind to just before this epoch."""

    def next_epoch(self) -> None: ...

    @property
    def has_next(self) -> bool:
        """Whether the epoch has another micro-batch."""

    def next(self) -> Any:
        """Advance to the next micro-batch and return its chunk of prompts, whether or not it starts a generation."""

    def following(self) -> Any | None:
        """Peek at the chunk after the current one without advancing; at the end of an epoch, at the first one of the
        next epoch. None at the end of a stream."""

    @property
    def num_done(self) -> int:
        """Number of prompts of this epoch whose chunks have been yielded all `repeats` times."""

    def repeat_chunk(self) -> None:
        """Restart the current chunk from its first micro-batch."""

    def state(self) -> dict[str, np.ndarray]:
        """Arrays for `restore`."""

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Continue from `state`. If its chunk size or number of repeats is different, continue after the prompts that
        were done."""


class RepeatSampler:
    """Chunks of prompts, each yielded `repeats` times in a row; an incomplete last chunk is dropped.

    All epochs draw from one random stream, epoch e using its e-th permutation, as in TRL's RepeatSampler.

    Args:
        rows: number of rows in the dataset.
        chunk: prompts per generation.
        repeats: micro-batches per generation.
        wraps: cycle through the dataset in order; each epoch starts after the last prompt of the previous one. Cannot
            be combined with `shuffle`.
    """

    def __init__(self, rows: int, *, chunk: int, repeats: int, shuffle: bool, seed: int, wraps: bool = False):
        self._rows, self._chunk, self._repeats = rows, chunk, repeats
        self._shuffle, self._seed, self._wraps = shuffle, seed, wraps
        self.num_chunks = max(rows // chunk, 1) if wraps else rows // chunk
        self.begin()

    def begin(self, epoch: int = 0) -> None:
        self._stream = TorchGenerator(self._seed)
        for _ in range(epoch):
            self.next_epoch()
        self._order, self._start, self._given = np.zeros(0, np.int64), 0, 0

    def next_epoch(self) -> None:
        if self._wraps:
            self._order = self._after_last(self.num_chunks * self._chunk)
        else:
            self._order = self._drawn(self._stream)
        self._start = self._given = 0

    def _drawn(self, stream: TorchGenerator) -> np.ndarray:
        """The order of an epoch, from the stream's current state."""
        return stream.permutation(self._rows) if self._shuffle else np.arange(self._rows)

    def _after_last(self, count: int) -> np.ndarray:
        """The indices of the next `count` prompts, wrapping around at the end of the dataset."""
        first = self._order[-1] + 1 if len(self._order) else 0
        return (first + np.arange(count)) % self._rows

    @property
    def has_next(self) -> bool:
        """Whether the epoch has another micro-batch."""
        chunks = (len(self._order) - self._start) // self._chunk
        return self._given < chunks * self._repeats

    def next(self) -> np.ndarray:
        """Row indices of the next micro-batch's prompts, int64 `[chunk]`."""
        first = self.num_done
        self._given += 1
        return self._order[first : first + self._chunk]

    def following(self) -> np.ndarray | None:
        first = self._start + (max(self._given - 1, 0) // self._repeats + 1) * self._chunk
        if first + self._chunk <= len(self._order):
            return self._order[first : first + self._chunk]
        if self._wraps:
            return self._after_last(self._chunk)
        stream = TorchGenerator(self._seed)
        stream.restore(self._stream.state())
        return self._drawn(stream)[: self._chunk]

    @property
    def num_done(self) -> int:
        return self._start + self._given // self._repeats * self._chunk

    def repeat_chunk(self) -> None:
        self._start, self._given = self.num_done, 0

    def state(self) -> dict[str, np.ndarray]:
        state = self._stream.state()
        numbers = np.asarray([self._given, state.used, state.position], np.int64)
        sizes = np.asarray([self._chunk, self._repeats, self._start], np.int64)
        return {"order": self._order, "stream": state.key, "numbers": numbers, "sizes": sizes}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        self._order, (given, used, position) = state["order"], state["numbers"].tolist()
        self._stream.restore(GeneratorState(state["stream"], used, position))
        sizes = self._chunk, self._repeats
        chunk, repeats, start = state["sizes"].tolist() if "sizes" in state else (*sizes, 0)  # earlier checkpoints
        if (chunk, repeats) == sizes:
            self._start, self._given = start, given
        else:
            self._start, self._given = start + given // repeats * chunk, 0


class StreamSampler:
    """`RepeatSampler` for a streaming dataset: yields rows instead of indices, in the order of the stream.

    Args:
        stream: read in its own order (shuffle it beforehand); `set_epoch` is called before each epoch, as in TRL.
        chunk, repeats: see `RepeatSampler`.
    """

    num_chunks = None

    def __init__(self, stream: IterableDataset, *, chunk: int, repeats: int):
        self._stream, self._size, self._repeats = stream, chunk, repeats
        self.begin()

    def begin(self, epoch: int = 0) -> None:
        self._epoch, self._start, self._chunks, self._given = epoch - 1, 0, 0, 0
        self._rows: Iterator[dict[str, Any]] = iter(())
        self._chunk: list[dict[str, Any]] = []
        self._following: list[dict[str, Any]] | None = None  # chunk that `following` has read ahead

    def next_epoch(self) -> None:
        """Raises ValueError if the epoch has fewer prompts than one chunk."""
        self._open(self._epoch + 1, 0)
        if not self.has_next:
            raise ValueError(
                f"train_dataset, a stream, must have at least the {self._size} prompts of a generation "
                f"(generation_batch_size / num_generations), got {len(self._chunk)}. Add prompts, or lower "
                "per_device_train_batch_size."
            )

    def _open(self, epoch: int, start: int, chunks: int = 0) -> None:
        """Start reading an epoch after its first `start` prompts and `chunks` chunks."""
        self._epoch, self._start, self._chunks, self._given, self._chunk = epoch, start, chunks, 0, []
        self._following = None
        self._stream.set_epoch(epoch)
        self._rows = islice(iter(self._stream), start + chunks * self._size, None)

    @property
    def has_next(self) -> bool:
        if self._epoch < 0:
            return False
        if not self._chunk or self._given == self._repeats:
            following, self._following = self._following, None
            self._chunk, self._given = list(islice(self._rows, self._size)) if following is None else following, 0
            self._chunks += 1
        return len(self._chunk) == self._size

    def next(self) -> list[dict[str, Any]]:
        """Return the current chunk of rows, which `has_next` has read. Call only if `has_next`."""
        self._given += 1
        return self._chunk

    def following(self) -> list[dict[str, Any]] | None:
        if self._following is None:
            self._following = list(islice(self._rows, self._size))
        return self._following if len(self._following) == self._size else None

    @property
    def num_done(self) -> int:
        return self._start + _done(self._chunks, self._given, self._repeats) * self._size

    def repeat_chunk(self) -> None:
        self._open(self._epoch, self.num_done)

    def state(self) -> dict[str, np.ndarray]:
        # numbers: the epoch, the number of chunks read, and how often the last one was yielded
        numbers, sizes = [self._epoch, self._chunks, self._given], [self._size, self._repeats, self._start]
        return {"numbers": np.asarray(numbers, np.int64), "sizes": np.asarray(sizes, np.int64)}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        epoch, chunks, given = state["numbers"].tolist()
        sizes = self._size, self._repeats
        size, repeats, start = state["sizes"].tolist() if "sizes" in state else (*sizes, 0)  # earlier checkpoints
        self.begin()
        if epoch < 0:
            return
        if (size, repeats) != sizes:
            self._open(epoch, start + _done(chunks, given, repeats) * size)
            return
        self._open(epoch, start, max(chunks - 1, 0))
        if chunks:
            self._chunk, self._chunks = list(islice(self._rows, self._size)), chunks
        self._given = given


def _done(chunks: int, given: int, repeats: int) -> int:
    """Number of chunks yielded all `repeats` times, if the last of `chunks` was yielded `given` times."""
    return chunks - (chunks > 0 and given < repeats)
