"""Prompts to completions, from the host's side: shapes, calls of compiled programs, and what has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from trl_jax.data.layout.batch import padded_length
from trl_jax.generation.chunk import Drawing, Status, first_tokens, next_tokens
from trl_jax.generation.decode import Decoding, Stops, begun, grown, refilled, selected, with_prompt_places
from trl_jax.generation.noise import KeyedSource, Noise, NoiseSource
from trl_jax.generation.prefill import prefill, recomputed
from trl_jax.generation.request import Completed, Completions, Progress, Request, Watch
from trl_jax.generation.shards import part_of_group
from trl_jax.generation.slots import Slots, power_of_two
from trl_jax.generation.weights import Weights, length_of_turn
from trl_jax.mesh.arrays import fetched

STEPS = 16  # of a call, after which the host looks whether completions have ended
FIRST_PLACES = 32  # places for tokens; twice as many whenever these are full
_PARTS = 8  # prompts that wait come in together, an eighth of those that there is room for


def generate(
    weights: Weights,
    request: Request,
    noise: NoiseSource | None = None,
    *,
    steps: int = STEPS,
    watch: Watch | None = None,
    progress: Progress | None = None,
) -> Completions:
    """Complete prompts, all at once.

    Args:
        noise: random numbers of chunks of `steps` steps; None takes the likeliest token each time.
        steps: tokens between two looks of the host; 1 where there is a watch.
        progress: is told after each look how far it is.
    """
    done: list[Completed] = []
    _Generation(weights, request, noise, steps, len(request.prompts), done.extend, watch).run(progress)
    return Completions.of(done, request.pad)


def generate_queue(
    weights: Weights,
    request: Request,
    noise: KeyedSource | None,
    done: Callable[[Sequence[Completed]], None],
    *,
    slots: int,
    steps: int = STEPS,
    progress: Progress | None = None,
) -> None:
    """Complete any number of prompts, `slots` at a time: where all completions of a prompt have ended, the next prompt
    takes its place, so that a step computes as many as there is room for.

    Args:
        noise: by row and position, so that no token depends on who else is there; None takes the likeliest.
        done: gets the completions that have ended, in the order in which they do.
        steps, progress: as in `generate`.
    """
    _Generation(weights, request, noise, steps, slots, done).run(progress)


def places(tokens: int) -> int:
    """Places for so many tokens: one of few numbers, each of which compiles once."""
    return max(FIRST_PLACES, power_of_two(tokens))


class _Generation:
    """One call of `generate`. `used` are the steps of a chunk of random numbers that were taken."""

    def __init__(
        self,
        weights: Weights,
        request: Request,
        noise: NoiseSource | None,
        steps: int,
        slots: int,
        done: Callable[[Sequence[Completed]], None],
        watch: Watch | None = None,
    ):
        self._weights, self._request, self._watch = weights, request, watch
        self._source, self._chunk, self._steps, self._used = noise, None, steps, steps
        self._shards = 1 if weights.shards is None else weights.shards.count
        parts = part_of_group(min(slots, len(request.prompts)), request.group, self._shards)
        self._request = request = request.in_parts(parts)
        self._slots = Slots(request, -(-slots * parts // self._shards) * self._shards, done, self._shards)
        self._prompt_places = padded_length(self._longest(self._slots.members), "auto")
        self._stops = Stops(
            np.asarray(request.eos or (-1,), np.int32), np.int32(request.pad), np.int32(request.max_new_tokens)
        )
        self._inputs = request.drawing()  # of all rows of the request
        longest = padded_length(max(map(len, request.texts)), "auto")
        self._max_tokens = longest + places(request.max_new_tokens)  # no prompt with its completion has more
        self._turn = length_of_turn(weights)
        self._turned = self._turn is not None and self._slots.longest(0) > self._turn

    def run(self, progress: Progress | None) -> None:
        slots, capacity = self._slots, places(min(self._request.max_new_tokens, FIRST_PLACES))
        state, status = self._first(slots.members, slots.longest(0), self._prompt_places, capacity, self._noise(0))
        self._used += 1
        while True:
            alive = self._alive(state, status)
            state, alive = self._refilled(state, alive)
            if progress is not None:
                progress(*slots.progress(state, alive))
            if not alive.any():
                break
            state = state._replace(alive=alive)
            state, status = self._advanced(self._compacted(state, alive), int(status.count))
        slots.give(state, np.ones(slots.members.shape, bool))

    def _first(
        self, members: np.ndarray, longest: int, prompt_places: int, capacity: int, noise: Noise | None
    ) -> tuple[Decoding, Status]:
        """The first token of each completion of these prompts, `[P', G]`; the longest text has `longest` tokens."""
        request, weights, prompts = self._request, self._weights, self._slots.prompts(members)
        tokens = np.full((len(prompts), prompt_places), request.pad, np.int32)
        for row, ids in zip(tokens, prompts, strict=True):
            row[: len(ids)] = ids
        logits, cache = prefill(
            weights.graph, weights.arrays, tokens, np.asarray([len(ids) for ids in prompts], np.int32),
            np.int32(longest), group=request.group, capacity=capacity, max_tokens=self._max_tokens,
            dtype=weights.dtype, head_dtype=weights.head_dtype, by_layer=weights.layers is not None,
            shards=weights.shards,
        )  # fmt: skip
        state, drawing = begun(cache, members.reshape(-1) >= 0, capacity, logps=request.logps), self._drawing(members)
        return first_tokens(logits, state, self._stops, noise, drawing, shards=weights.shards)

    def _longest(self, members: np.ndarray) -> int:
        """Tokens of the longest of these prompts."""
        return max(map(len, self._slots.prompts(members)))

    def _drawing(self, members: np.ndarray) -> Drawing:
        """How tokens of these rows are drawn."""
        rows = members.reshape(-1)
        return self._inputs._replace(prompt_ids=self._inputs.prompt_ids[rows], pads=self._inputs.pads[rows])

    def _noise(self, count: int) -> Noise | None:
        """The chunk of random numbers that has those of the next step, of which there were `count`."""
        if self._source is not None and self._used == self._steps:
            self._chunk = self._source.noise(self._slots.rows, self._slots.drawn(count))
        self._used %= self._steps
        return self._chunk

    def _advanced(self, state: Decoding, count: int) -> tuple[Decoding, Status]:
        weights, noise = self._weights, self._noise(count)
        first, longest = self._used, self._slots.longest(count)
        state, most = self._at_turn(state, longest)
        steps = min(self._steps - first, most)
        if count + steps > state.capacity and state.capacity < self._request.max_new_tokens:
            alive = state.alive  # of the host's memory, as in every call: another kind would be dispatched anew
            state = grown(state, capacity=places(state.capacity + 1))._replace(alive=alive)
        drawing = self._drawing(self._slots.members)
        state, status = next_tokens(
            weights.graph, weights.arrays, weights.layers, state, self._stops, noise, drawing, np.int32(first),
            np.int32(steps), np.int32(longest), dtype=weights.dtype,
            head_dtype=weights.head_dtype, max_tokens=self._max_tokens, shards=weights.shards,
        )  # fmt: skip
        self._used = first + steps
        return state, status

    def _at_turn(self, state: Decoding, longest: int) -> tuple[Decoding, int]:
        """The state for a step that has a text of `longest` tokens, and how many steps it serves: ropes may turn all
        tokens otherwise once a text has more than a certain number."""
        if self._turn is None:
            return state, self._steps
        if self._turned != (longest > self._turn):
            self._turned = not self._turned
            weights, places = self._weights, self._prompt_places
            texts = np.zeros((len(state.tokens), places + state.capacity), np.int32)
            prompts, completions = self._slots.prompts(self._slots.rows[:, None]), fetched(state.in_order())
            for row, prompt, own in zip(texts, prompts, completions, strict=True):
                row[: len(prompt)] = prompt
                row[len(prompt) : len(prompt) + len(own)] = own
            state = recomputed(
                weights.graph, weights.arrays, state, texts, np.int32(longest), max_tokens=self._max_tokens,
                dtype=weights.dtype, by_layer=weights.layers is not None, shards=weights.shards,
            )  # fmt: skip
        return state, self._steps if self._turned else self._turn + 1 - longest

    def _alive(self, state: Decoding, status: Status) -> np.ndarray:
        """Which completions go on, bool `[P' x G']`: what the program says, and the watch."""
        alive = np.asarray(status.alive)
        if self._watch is None:
            return alive
        rows, place = self._request.rows, (int(status.count) - 1) % state.capacity
        kept = self._watch.tokens(fetched(state.tokens)[:rows, place], alive[:rows])
        return alive if kept is None else alive & np.pad(kept, (0, len(alive) - rows))

    def _refilled(self, state: Decoding, alive: np.ndarray) -> tuple[Decoding, np.ndarray]:
        """The state with prompts that wait in the places of those that have ended, once enough are free; and what goes
        on in it. Not within a chunk of random numbers, which are those of the rows that it began with."""
        slots = self._slots
        together = max(1, slots.each // _PARTS)  # of each shard
        while slots.waiting and (self._used == self._steps or not alive.any()):
            free = slots.free(alive)
            if sum(map(len, free)) < together * self._shards:
                break
            self._used = self._steps
            state = self._with_prompts(state, *slots.refill(state, free, together))
            alive = fetched(state.alive)
        return state, alive

    def _with_prompts(self, state: Decoding, fresh: np.ndarray, at: np.ndarray) -> Decoding:
        """The state with the prompts of these members `[P', G]`, and the first token of each, in these slots."""
        noise = None if self._source is None else self._source.noise(fresh.reshape(-1), np.zeros(fresh.size))
        longest = self._slots.longest(int(state.count) - 1)
        first, _ = self._first(fresh, longest, power_of_two(max(32, self._longest(fresh))), 1, noise)
        longest = self._longest(self._slots.members)
        if not self._prompt_places // 2 < longest <= self._prompt_places:
            self._prompt_places = power_of_two(max(32, longest))
            state = with_prompt_places(state, count=self._prompt_places)
        return refilled(state, at, first, shards=self._weights.shards)

    def _compacted(self, state: Decoding, alive: np.ndarray) -> Decoding:
        """The state without completions that have ended; between chunks only, not while prompts wait, and not for a
        watch, which knows rows by their place."""
        if self._slots.waiting or self._watch is not None or self._used < self._steps:
            return state
        kept = self._slots.compact(state, alive)
        return state if kept is None else selected(state, *kept, shards=self._weights.shards)
