"""The rows of a request that are computed at a time: which they are, which wait, and what has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from trl_jax.generation.decode import Decoding
from trl_jax.generation.request import Completed, Request


class Slots:
    """The slots of a state, each with a prompt and its completions.

    Args:
        count: slots. done: gets completions that have ended.

    Attributes:
        members: rows of the request, `[P, G]`, -1 where one only fills the shape. begun: the step at which each prompt
            began. waiting: numbers of prompts that have no slot yet.
    """

    def __init__(self, request: Request, count: int, done: Callable[[Sequence[Completed]], None]):
        self._request, self._done = request, done
        first = range(min(count, len(request.prompts)))
        self.members, self.begun = self._rows_of(first), np.zeros(len(first), np.int32)
        self.waiting = deque(range(len(first), len(request.prompts)))
        self._lengths = np.zeros(request.rows, np.int32)
        self._ahead = max(map(len, self.prompts(self.members)))

    @property
    def rows(self) -> np.ndarray:
        """The members, `[P x G]`; some row where one only fills the shape."""
        return np.maximum(self.members, 0).reshape(-1)

    def drawn(self, count: int) -> np.ndarray:
        """Tokens that each row has after so many steps."""
        return count - np.repeat(self.begun, self.members.shape[1])

    def prompts(self, members: np.ndarray) -> list[np.ndarray]:
        """Their token ids."""
        return [self._request.prompts[row // self._request.group] for row in members[:, 0]]

    def longest(self, count: int) -> int:
        """Tokens of the longest text after so many steps, those behind a text's end among them: as where rows that have
        ended stay."""
        return self._ahead + count

    def free(self, alive: np.ndarray) -> np.ndarray:
        """Slots in which all completions have ended."""
        return np.flatnonzero(~alive.reshape(self.members.shape).any(axis=1))

    def refill(self, state: Decoding, free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Hand over the completions of free slots, and give these to prompts that wait.

        Returns the members of the new prompts, `[P', G]`, as many as are free, and their slots: one that is not there
        for those that only fill the shape.
        """
        numbers = [self.waiting.popleft() for _ in free[: len(self.waiting)]]
        at, fillers = free[: len(numbers)], len(free) - len(numbers)
        ended = np.zeros(self.members.shape, bool)
        ended[at] = True
        self.give(state, ended)
        fresh = self._rows_of([*numbers, *[numbers[0]] * fillers])
        self.members[at], self.begun[at] = fresh[: len(numbers)], int(state.count) - 1
        lengths = np.asarray([len(prompt) for prompt in self.prompts(self.members)])
        self._ahead = int(np.max(lengths - self.begun))
        return fresh, np.concatenate([at, np.full(fillers, len(self.members))]).astype(np.int32)

    def compact(self, state: Decoding, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Leave out, and hand over, completions that have ended, where fewer than half of the shape would be left.

        Returns what `decode.selected` is told: prompts `[P']`, their members `[P', G']`, and which of them live.
        """
        alive = alive.reshape(self.members.shape)
        prompts = np.flatnonzero(alive.any(axis=1))
        shape = power_of_two(len(prompts)), power_of_two(alive.sum(axis=1).max())
        if 2 * shape[0] * shape[1] > alive.size:
            return None
        self.give(state, ~alive)
        at, members, living = np.zeros(shape[0], np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool)
        at[: len(prompts)] = prompts
        for row, prompt in enumerate(prompts):
            own = np.flatnonzero(alive[prompt])
            members[row, : len(own)], living[row, : len(own)] = own, True
        self.members = np.where(living, self.members[at[:, None], members], -1)
        self.begun = self.begun[at]
        return at, members, living

    def progress(self, state: Decoding, alive: np.ndarray) -> tuple[int, int]:
        """Completions that have ended, and tokens of all of them so far."""
        members, lengths = self.members.reshape(-1), self._lengths.copy()
        lengths[members[members >= 0]] = np.asarray(state.lengths)[members >= 0]
        left = len(self.waiting) * self._request.group + int(alive.sum())
        return self._request.rows - left, int(lengths.sum())

    def give(self, state: Decoding, which: np.ndarray) -> None:
        """Hand over the completions of these members, bool `[P, G]`, which have ended."""
        taken = np.flatnonzero((which & (self.members >= 0)).reshape(-1))
        rows, begun = self.members.reshape(-1)[taken], np.repeat(self.begun, self.members.shape[1])[taken]
        at = (begun[:, None] + np.arange(state.capacity)) % state.capacity
        tokens = np.take_along_axis(np.asarray(state.tokens)[taken], at, axis=1)
        lengths = np.asarray(state.lengths)[taken]
        logps = [None] * len(rows)
        if state.logps is not None:
            logps = np.take_along_axis(np.asarray(state.logps)[taken], at, axis=1)
        self._lengths[rows] = lengths
        self._done([
            Completed(int(row), ids[:length], None if own is None else own[:length])
            for row, ids, own, length in zip(rows, tokens, logps, lengths, strict=True)
        ])  # fmt: skip

    def _rows_of(self, prompts: Sequence[int]) -> np.ndarray:
        return np.asarray(prompts)[:, None] * self._request.group + np.arange(self._request.group)


def power_of_two(number: int) -> int:
    """The smallest that is no less."""
    return 1 << (int(number) - 1).bit_length()
