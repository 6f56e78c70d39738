"""The rows of a request that are computed at a time: which they are, which wait, and what has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from trl_jax.generation.decode import Decoding
from trl_jax.generation.request import Completed, Request
from trl_jax.mesh.arrays import fetched


class Slots:
    """The slots of a state, each with a prompt and its completions.

    Args:
        count: slots, which come out even. done: gets completions that have ended. shards: devices among which the slots
            are divided in equal runs.

    Attributes:
        members: rows of the request, `[P, G]`, -1 where one only fills the shape. begun: the step at which each prompt
            began. waiting: numbers of prompts that have no slot yet.
    """

    def __init__(self, request: Request, count: int, done: Callable[[Sequence[Completed]], None], shards: int = 1):
        self._request, self._done, self._shards = request, done, shards
        first = range(min(count, len(request.prompts)))
        count = -(-len(first) // shards) * shards
        self.members, self.begun = np.full((count, request.group), -1), np.zeros(count, np.int32)
        self.members[: len(first)] = self._rows_of(first)
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
        """Their token ids, behind virtual tokens."""
        return [self._request.texts[row // self._request.group] for row in members[:, 0]]

    def longest(self, count: int) -> int:
        """Tokens of the longest text after so many steps, those behind a text's end among them: as where rows that have
        ended stay."""
        return self._ahead + count

    @property
    def each(self) -> int:
        """The slots of a shard."""
        return len(self.members) // self._shards

    def free(self, alive: np.ndarray) -> list[np.ndarray]:
        """Slots in which all completions have ended, those of each shard as counted within it."""
        ended = ~alive.reshape(self._shards, self.each, -1).any(axis=2)
        return [np.flatnonzero(own) for own in ended]

    def refill(self, state: Decoding, free: Sequence[np.ndarray], most: int) -> tuple[np.ndarray, np.ndarray]:
        """Hand over the completions of free slots, at most so many of a shard, and give these to prompts that wait.

        Returns the members of the new prompts, `[P', G]`, `most` of each shard, and their slots as counted within it:
        one that is not there for those that only fill the shape.
        """
        wanted = [(shard, slot) for shard, own in enumerate(free) for slot in own[:most]][: len(self.waiting)]
        numbers = [self.waiting.popleft() for _ in wanted]
        at = np.asarray([shard * self.each + slot for shard, slot in wanted])
        ended = np.zeros(self.members.shape, bool)
        ended[at] = True
        self.give(state, ended)
        self.members[at], self.begun[at] = self._rows_of(numbers), int(state.count) - 1
        lengths = np.asarray([len(prompt) for prompt in self.prompts(self.members)])
        self._ahead = int(np.max(lengths - self.begun))
        prompts, slots = np.full((self._shards, most), numbers[0]), np.full((self._shards, most), self.each, np.int32)
        for shard in range(self._shards):
            own = [(number, slot) for number, (of, slot) in zip(numbers, wanted, strict=True) if of == shard]
            for place, (number, slot) in enumerate(own):
                prompts[shard, place], slots[shard, place] = number, slot
        return self._rows_of(prompts.reshape(-1)), slots.reshape(-1)

    def compact(self, state: Decoding, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Leave out, and hand over, completions that have ended, where fewer than half of the shape would be left.

        Returns what `decode.selected` is told: prompts `[P']` of each shard, their members `[P', G']`, and which of
        them live.
        """
        alive = alive.reshape(self.members.shape)
        prompts = [np.flatnonzero(own.any(axis=1)) for own in np.split(alive, self._shards)]
        shape = power_of_two(max(1, *map(len, prompts))), power_of_two(alive.sum(axis=1).max())
        if 2 * self._shards * shape[0] * shape[1] > alive.size:
            return None
        self.give(state, ~alive)
        at = np.zeros((self._shards, shape[0]), np.int32)
        members, living = np.zeros((*at.shape, shape[1]), np.int32), np.zeros((*at.shape, shape[1]), bool)
        first = np.arange(self._shards)[:, None] * self.each
        for shard, of_shard in enumerate(prompts):
            at[shard, : len(of_shard)] = of_shard
            for place, prompt in enumerate(of_shard):
                own = np.flatnonzero(alive[first[shard, 0] + prompt])
                members[shard, place, : len(own)], living[shard, place, : len(own)] = own, True
        at, numbers = at.reshape(-1), (first + at).reshape(-1)
        members, living = (each.reshape(-1, shape[1]) for each in (members, living))
        self.members = np.where(living, self.members[numbers[:, None], members], -1)
        self.begun = self.begun[numbers]
        return at, members, living

    def progress(self, state: Decoding, alive: np.ndarray) -> tuple[int, int]:
        """Completions that have ended, and tokens of all of them so far."""
        members, lengths = self.members.reshape(-1), self._lengths.copy()
        lengths[members[members >= 0]] = fetched(state.lengths)[members >= 0]
        left = len(self.waiting) * self._request.group + int(alive.sum())
        return self._request.rows - left, int(lengths.sum())

    def give(self, state: Decoding, which: np.ndarray) -> None:
        """Hand over the completions of these members, bool `[P, G]`, which have ended."""
        taken = np.flatnonzero((which & (self.members >= 0)).reshape(-1))
        rows, begun = self.members.reshape(-1)[taken], np.repeat(self.begun, self.members.shape[1])[taken]
        at = (begun[:, None] + np.arange(state.capacity)) % state.capacity
        tokens = np.take_along_axis(fetched(state.tokens)[taken], at, axis=1)
        lengths = fetched(state.lengths)[taken]
        logps = [None] * len(rows)
        if state.logps is not None:
            logps = np.take_along_axis(fetched(state.logps)[taken], at, axis=1)
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
