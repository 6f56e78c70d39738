"""The order in which prompts are completed, TRL's to the index."""

from __future__ import annotations

import numpy as np

from trl_jax.core.torch_random import GeneratorState, TorchGenerator


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

    def begin(self) -> None:
        """Before the first epoch."""
        self._stream = TorchGenerator(self._seed)
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
