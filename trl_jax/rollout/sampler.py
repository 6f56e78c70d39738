"""The order in which prompts are completed, TRL's to the index."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np
from datasets import IterableDataset

from trl_jax.core.torch_random import GeneratorState, TorchGenerator


class Sampler(Protocol):
    """The prompts of each micro-batch, epoch after epoch."""

    num_chunks: int | None  # of an epoch; None: nobody knows

    def begin(self, epoch: int = 0) -> None:
        """Before this epoch."""

    def next_epoch(self) -> None: ...

    @property
    def has_next(self) -> bool:
        """Whether the epoch has another micro-batch."""

    def next(self) -> Any:
        """The chunk of prompts that the next micro-batch's generation has, or would have."""

    def state(self) -> dict[str, np.ndarray]:
        """For `restore`."""

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Go on from a `state`."""


class RepeatSampler:
    """Chunks of prompts, each given out `repeats` times in a row; a last chunk that is not full is left out.

    All epochs' orders come from one stream, the e-th one from its e-th permutation, as in TRL's RepeatSampler.

    Args:
        rows: of the dataset. chunk: prompts of a generation. repeats: micro-batches between two generations.
    """

    def __init__(self, rows: int, *, chunk: int, repeats: int, shuffle: bool, seed: int):
        self._rows, self._chunk, self._repeats = rows, chunk, repeats
        self._shuffle, self._seed = shuffle, seed
        self.num_chunks = rows // chunk
        self.begin()

    def begin(self, epoch: int = 0) -> None:
        self._stream = TorchGenerator(self._seed)
        for _ in range(epoch):
            self.next_epoch()
        self._order, self._given = np.zeros(0, np.int64), 0

    def next_epoch(self) -> None:
        self._order = self._stream.permutation(self._rows) if self._shuffle else np.arange(self._rows)
        self._given = 0

    @property
    def has_next(self) -> bool:
        """Whether the epoch has another micro-batch."""
        return len(self._order) > 0 and self._given < self.num_chunks * self._repeats

    def next(self) -> np.ndarray:
        """The prompts, int64 `[chunk]`, that the next micro-batch's generation has, or would have."""
        number = self._given // self._repeats
        self._given += 1
        return self._order[number * self._chunk : (number + 1) * self._chunk]

    def state(self) -> dict[str, np.ndarray]:
        """For `restore`."""
        state = self._stream.state()
        numbers = np.asarray([self._given, state.used, state.position], np.int64)
        return {"order": self._order, "stream": state.key, "numbers": numbers}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Go on from a `state`."""
        self._order, (self._given, used, position) = state["order"], state["numbers"].tolist()
        self._stream.restore(GeneratorState(state["stream"], used, position))


class StreamSampler:
    """The same of a stream, whose rows themselves are given out, in the order in which it has them.

    Args:
        stream: shuffled, where its order is to change: it is told each epoch, as TRL does.
        chunk, repeats: as in `RepeatSampler`.
    """

    num_chunks = None

    def __init__(self, stream: IterableDataset, *, chunk: int, repeats: int):
        self._stream, self._size, self._repeats = stream, chunk, repeats
        self.begin()

    def begin(self, epoch: int = 0) -> None:
        self._epoch, self._chunks, self._given = epoch - 1, 0, 0
        self._rows: Iterator[dict[str, Any]] = iter(())
        self._chunk: list[dict[str, Any]] = []

    def next_epoch(self) -> None:
        """Raise ValueError where the epoch has no whole chunk."""
        self._open(self._epoch + 1, 0)
        if not self.has_next:
            raise ValueError(
                f"train_dataset, a stream, has {len(self._chunk)} prompts, and a generation takes {self._size} "
                "(generation_batch_size / num_generations). Give it more, or lower per_device_train_batch_size."
            )

    def _open(self, epoch: int, chunks: int) -> None:
        """Read an epoch from behind its first `chunks`."""
        self._epoch, self._chunks, self._given, self._chunk = epoch, chunks, 0, []
        self._stream.set_epoch(epoch)
        self._rows = islice(iter(self._stream), chunks * self._size, None)

    @property
    def has_next(self) -> bool:
        if self._epoch < 0:
            return False
        if not self._chunk or self._given == self._repeats:
            self._chunk, self._given = list(islice(self._rows, self._size)), 0
            self._chunks += 1
        return len(self._chunk) == self._size

    def next(self) -> list[dict[str, Any]]:
        """Rows, `[chunk]` of them; only where `has_next`."""
        self._given += 1
        return self._chunk

    def state(self) -> dict[str, np.ndarray]:
        """The epoch, chunks of it that were read, and how often the last one was given out."""
        return {"numbers": np.asarray([self._epoch, self._chunks, self._given], np.int64)}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        epoch, chunks, given = state["numbers"].tolist()
        self.begin()
        if epoch < 0:
            return
        self._open(epoch, max(chunks - 1, 0))
        if chunks:
            self._chunk, self._chunks = list(islice(self._rows, self._size)), chunks
        self._given = given
