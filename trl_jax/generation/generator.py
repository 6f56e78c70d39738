"""Generate completions for prompts, on the host: schedule prompts over the slots of the batch, and call the compiled
programs of `decode`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.core.outputs import NO_VIRTUAL_TOKENS, VirtualTokens
from trl_jax.data.batch import padded_length
from trl_jax.data.images import TEXT_ALONE, PromptImages, TextImages, prompt_images, rounded_up
from trl_jax.generation.decode import (
    Decoding,
    SamplingInputs,
    Status,
    Stops,
    first_tokens,
    full_cache,
    grow,
    initial_state,
    next_tokens,
    prefill,
    recomputed,
    refilled,
    selected,
    with_prompt_capacity,
)
from trl_jax.generation.noise import Noise, NoiseSource, QueueSource
from trl_jax.generation.reuse import Piece, TurnCache
from trl_jax.generation.sampling import Processor
from trl_jax.generation.weights import Weights, part_of_group
from trl_jax.mesh.mesh import TENSOR, fetched
from trl_jax.nn.cache import Cache, CacheSize, StateCache, TokenCache

STEPS = 16  # decoding steps per call, after which the host checks which completions have ended
FIRST_CAPACITY = 32  # initial capacity in tokens; doubled whenever it is full
SHARE = 3 / 4  # fraction of the free memory that the cache may use; the rest is for prefill and for growing the cache
_COPIES = 1 / 16  # if a group is split over slots: largest ratio of copied prompts to completions in the cache
_PARTS = 8  # waiting prompts are admitted together, at least 1/8 of the slots at a time


def generate(
    weights: Weights,
    request: Request,
    noise: NoiseSource | None = None,
    *,
    steps: int = STEPS,
    watch: Watch | None = None,
    progress: Progress | None = None,
    turns: TurnCache | None = None,
) -> Completions:
    """Complete all prompts in one batch.

    Args:
        noise: random numbers in chunks of `steps` steps; None decodes greedily.
        steps: tokens between two checks by the host; must be 1 with a `watch`.
        watch: sees every token, and may stop completions.
        progress: called after each check.
        turns: the cache of the last turn, if the prompts are the next turns of conversations; replaced by the cache of
            this turn. Not with a `watch`.
    """
    done: list[Completed] = []
    generation = _Generation(weights, request, noise, steps, len(request.prompts), done.extend, watch, turns)
    generation.run(progress)
    completions = Completions.of(done, request.pad)
    if turns is not None:
        turns.end(generation.pieces, *request.with_completions(completions))
    return completions


def generate_queue(
    weights: Weights,
    request: Request,
    noise: QueueSource | None,
    done: Callable[[Sequence[Completed]], None],
    *,
    slots: int,
    steps: int = STEPS,
    progress: Progress | None = None,
) -> None:
    """Complete any number of prompts, `slots` at a time (continuous batching).

    When all completions of a prompt have ended, a waiting prompt takes its slot, so that the batch stays full.

    Args:
        noise: of each row and step, so that a token does not depend on when its row is generated; None decodes
            greedily.
        done: receives completions as they end.
        steps, progress: see `generate`.
    """
    _Generation(weights, request, noise, steps, slots, done).run(progress)


def cache_capacity(tokens: int) -> int:
    """Cache capacity for this many tokens, rounded up to a power of two to limit the number of compilations."""
    return max(FIRST_CAPACITY, power_of_two(tokens))


class _Generation:
    """One call of `generate` or `generate_queue`.

    `pieces` of the cache are for the next turn. `_used` is the number of used steps of the current noise chunk.
    """

    def __init__(
        self,
        weights: Weights,
        request: Request,
        noise: NoiseSource | None,
        steps: int,
        slots: int,
        done: Callable[[Sequence[Completed]], None],
        watch: Watch | None = None,
        turns: TurnCache | None = None,
    ):
        self._weights, self._watch, self._turns = weights, watch, turns
        self.pieces: list[Piece] = []
        self._source, self._chunk, self._steps, self._used = noise, None, steps, steps
        self._shards = weights.num_shards
        parts = part_of_group(min(slots, len(request.prompts)), request.group, self._shards)
        self._request = request = request.in_parts(parts)
        self._continued = continued = (
            None if turns is None else turns.begin(request.texts, request.images, request.group, self._shards)
        )
        count = -(-slots * parts // self._shards) * self._shards
        self._slots = Slots(request, count, done, self._shards, continued and continued.shard_of)
        self._prompt_capacity = padded_length(self._longest(self._slots.request_rows), "auto")
        self._stops = request.stops()
        self._inputs = request.sampling_inputs()  # for all rows of the request
        longest = padded_length(max(map(len, request.texts)), "auto")
        self._max_tokens = longest + cache_capacity(request.max_new_tokens)  # bound on prompt + completion
        self._switch_length = weights.longrope_switch_length
        self._switched = self._switch_length is not None and self._slots.longest(0) > self._switch_length

    def run(self, progress: Progress | None) -> None:
        slots, capacity = self._slots, cache_capacity(min(self._request.max_new_tokens, FIRST_CAPACITY))
        noise = self._noise(0, slots.request_rows.reshape(-1) >= 0)
        state, status = self._first(slots.request_rows, slots.longest(0), self._prompt_capacity, capacity, noise)
        self._used += 1
        while True:
            alive = self._alive(state, status)
            state, alive = self._refilled(state, alive)
            if progress is not None:
                progress(*slots.progress(state, alive))
            if not alive.any():
                break
            state, alive = self._compacted(state._replace(alive=alive), alive)
            state, status = self._advanced(state, alive, int(status.count))
        slots.give(state, np.ones(slots.request_rows.shape, bool))
        self._keep(state, slots.request_rows)

    def _first(
        self, request_rows: np.ndarray, longest: int, prompt_capacity: int, capacity: int, noise: Noise | None
    ) -> tuple[Decoding, Status]:
        """Prefill the prompts of these rows `[P', G]` and sample the first token of each completion.

        Args:
            longest: tokens of the longest text in the batch.
        """
        if self._continued is None:
            logits, cache = self._prefilled(request_rows, longest, prompt_capacity, capacity)
        else:
            size = CacheSize(self._request.group, capacity)
            logits, cache = self._continued.prefilled(
                self._weights, request_rows[:, 0], size, prompt_capacity, self._max_tokens
            )
            self._continued = None
        state = initial_state(cache, request_rows.reshape(-1) >= 0, capacity, logps=self._request.logps)
        sampling = self._inputs_of(request_rows)
        return first_tokens(logits, state, self._stops, noise, sampling, shards=self._weights.shards)

    def _prefilled(
        self, request_rows: np.ndarray, longest: int, prompt_capacity: int, capacity: int
    ) -> tuple[jax.Array, Cache]:
        request, weights, prompts = self._request, self._weights, self._slots.prompts(request_rows)
        tokens = np.full((len(prompts), prompt_capacity), request.pad, np.int32)
        for row, ids in zip(tokens, prompts, strict=True):
            row[: len(ids)] = ids
        lengths, images = (
            np.asarray([len(ids) for ids in prompts], np.int32),
            self._images(request_rows, prompt_capacity),
        )
        sizes = {"group": request.group, "capacity": capacity, "max_tokens": self._max_tokens}
        return prefill(weights, tokens, lengths, np.int32(longest), images, **sizes)

    @property
    def _keeps(self) -> bool:
        """Whether the cache is kept for another turn."""
        return self._turns is not None and self._turns.keeps

    def _keep(self, state: Decoding, request_rows: np.ndarray) -> None:
        """Keep the cache of these completions, `[P, G]` with -1 for others, if there may be another turn."""
        if self._keeps:
            self.pieces.append(Piece(state.cache.parts, fetched(state.cache.fill.prompt_lengths), request_rows))

    def _images(self, request_rows: np.ndarray, prompt_capacity: int) -> PromptImages:
        """The images of these rows' prompts."""
        texts = self._request.images
        if texts is None:
            return TEXT_ALONE
        return prompt_images(
            [texts[row // self._request.group] for row in request_rows[:, 0]], prompt_capacity, self._shards
        )

    def _longest(self, request_rows: np.ndarray) -> int:
        """Tokens of the longest of these prompts."""
        return max(map(len, self._slots.prompts(request_rows)))

    def _inputs_of(self, request_rows: np.ndarray) -> SamplingInputs:
        """Sampling inputs for these rows."""
        rows = request_rows.reshape(-1)
        return self._inputs._replace(prompt_ids=self._inputs.prompt_ids[rows], pads=self._inputs.pads[rows])

    def _noise(self, count: int, alive: np.ndarray) -> Noise | None:
        """The noise chunk for the next step; `count` steps were taken so far."""
        if self._source is not None and self._used == self._steps:
            self._chunk = self._source.noise(np.where(alive, self._slots.rows, -1), self._slots.num_tokens(count))
        self._used %= self._steps
        return self._chunk

    def _advanced(self, state: Decoding, alive: np.ndarray, count: int) -> tuple[Decoding, Status]:
        noise = self._noise(count, alive)
        first, longest = self._used, self._slots.longest(count)
        state, most = self._switch_rope(state, longest)
        steps = min(self._steps - first, most)
        needed = self._slots.num_tokens(count)[alive].max() + steps
        if needed > state.capacity and state.capacity < self._request.max_new_tokens:
            state = grow(state, capacity=cache_capacity(state.capacity + 1))
        sampling = self._inputs_of(self._slots.request_rows)
        state, status = next_tokens(
            self._weights, state, self._stops, noise, sampling, np.int32(first), np.int32(steps), np.int32(longest),
            max_tokens=self._max_tokens, keeps=self._keeps,
        )  # fmt: skip
        self._used = first + steps
        return state, status

    def _switch_rope(self, state: Decoding, longest: int) -> tuple[Decoding, int]:
        """The state for a step whose longest text has `longest` tokens, and the number of steps for which it is valid.

        LongRoPE changes the rotation of all tokens once a text exceeds a certain length; the cache is then recomputed.
        """
        if self._switch_length is None:
            return state, self._steps
        if self._switched != (longest > self._switch_length):
            self._switched = not self._switched
            texts = np.zeros((len(state.tokens), self._prompt_capacity + state.capacity), np.int32)
            prompts, completions = self._slots.prompts(self._slots.rows[:, None]), fetched(state.in_order())
            for row, prompt, completion in zip(texts, prompts, completions, strict=True):
                row[: len(prompt)] = prompt
                row[len(prompt) : len(prompt) + len(completion)] = completion
            state = recomputed(self._weights, state, texts, np.int32(longest), max_tokens=self._max_tokens)
        return state, self._steps if self._switched else self._switch_length + 1 - longest

    def _alive(self, state: Decoding, status: Status) -> np.ndarray:
        """Which completions continue, bool `[P' x G']`, according to the compiled program, the stop rule and the
        watch."""
        alive = np.asarray(status.alive)
        if self._request.stop is not None:
            alive = self._slots.stopped(state, alive, self._request.stop)
        if self._watch is None:
            return alive
        rows, place = self._request.rows, (int(status.count) - 1) % state.capacity
        goes_on = self._watch.tokens(fetched(state.tokens)[:rows, place], alive[:rows])
        return alive if goes_on is None else alive & np.pad(goes_on, (0, len(alive) - rows))

    def _refilled(self, state: Decoding, alive: np.ndarray) -> tuple[Decoding, np.ndarray]:
        """Move waiting prompts into free slots once enough are free; returns the state and which completions continue.

        Only between noise chunks, because a chunk is drawn for the rows at its start.
        """
        slots = self._slots
        together = max(1, slots.each // _PARTS)  # per shard
        while slots.waiting and (self._used == self._steps or not alive.any()):
            free = slots.free(alive)
            if sum(map(len, free)) < together * self._shards:
                break
            self._used = self._steps
            state = self._with_prompts(state, *slots.refill(state, free, together))
            alive = fetched(state.alive)
        return state, alive

    def _with_prompts(self, state: Decoding, fresh: np.ndarray, at: np.ndarray) -> Decoding:
        """Prefill the prompts of `fresh` `[P', G]`, sample their first tokens, and put them into the slots `at`."""
        noise = None if self._source is None else self._source.first(fresh.reshape(-1))
        longest = self._slots.longest(int(state.count) - 1)
        first, _ = self._first(fresh, longest, power_of_two(max(32, self._longest(fresh))), 1, noise)
        longest = self._longest(self._slots.request_rows)
        if not self._prompt_capacity // 2 < longest <= self._prompt_capacity:
            self._prompt_capacity = power_of_two(max(32, longest))
            state = with_prompt_capacity(state, count=self._prompt_capacity)
        return refilled(state, at, first, shards=self._weights.shards)

    def _compacted(self, state: Decoding, alive: np.ndarray) -> tuple[Decoding, np.ndarray]:
        """Drop ended completions from the state, and from `alive`. Only between noise chunks, when no prompt waits, and
        without a watch, which identifies rows by their index."""
        if self._slots.waiting or self._watch is not None or self._used < self._steps:
            return state, alive
        before = self._slots.request_rows
        selection = self._slots.compact(state, alive)
        if selection is None:
            return state, alive
        self._keep(state, np.where(alive.reshape(before.shape), -1, before))
        return selected(state, *selection, shards=self._weights.shards, keep=self._keeps), selection[-1].reshape(-1)


# Slots


class Slots:
    """Assigns prompts to the slots of the decoding state; each slot holds a prompt and its completions.

    Args:
        count: number of slots; rounded up to a multiple of `shards`.
        done: receives completions that have ended.
        shards: number of devices that the slots are sharded over, in equal contiguous runs.
        shard_of: the shard of each prompt; None divides them in order.

    Attributes:
        request_rows: rows of the request, `[P, G]`; -1 for padding.
        begun: the step at which each prompt started, `[P]`.
        waiting: indices of prompts without a slot yet.
    """

    def __init__(
        self,
        request: Request,
        count: int,
        done: Callable[[Sequence[Completed]], None],
        shards: int = 1,
        shard_of: Sequence[int] | None = None,
    ):
        self._request, self._done, self._shards = request, done, shards
        first = range(min(count, len(request.prompts)))
        count = request.slots if len(first) == len(request.prompts) else len(first)
        chunk = -(-count // shards)
        runs = [first[shard * chunk : (shard + 1) * chunk] for shard in range(shards)]
        if shard_of is not None:
            runs = [[prompt for prompt in first if shard_of[prompt] == shard] for shard in range(shards)]
            most = max(map(len, runs))
            chunk = max(chunk, rounded_up(most, 1) if request.varies else most)
        self.request_rows, self.begun = np.full((shards * chunk, request.group), -1), np.zeros(shards * chunk, np.int32)
        for shard, run in enumerate(runs):
            self.request_rows[shard * chunk : shard * chunk + len(run)] = self._rows_of(run)
        self.waiting = deque(range(len(first), len(request.prompts)))
        self._lengths = np.zeros(request.rows, np.int32)
        self._checked, self._ends = np.zeros(request.rows, np.int32), np.full(request.rows, request.max_new_tokens)
        self._ahead = max(map(len, self.prompts(self.request_rows)))

    @property
    def rows(self) -> np.ndarray:
        """The rows of the request, `[P x G]`; 0 for padding."""
        return np.maximum(self.request_rows, 0).reshape(-1)

    def num_tokens(self, count: int) -> np.ndarray:
        """Number of tokens of each row after `count` steps."""
        return count - np.repeat(self.begun, self.request_rows.shape[1])

    def prompts(self, request_rows: np.ndarray) -> list[np.ndarray]:
        """The prompts of these rows as token ids, after any virtual tokens."""
        return [self._request.texts[row // self._request.group] for row in request_rows[:, 0]]

    def longest(self, count: int) -> int:
        """Tokens of the longest text after `count` steps, including padding after ended completions."""
        return self._ahead + count

    @property
    def each(self) -> int:
        """Slots per shard."""
        return len(self.request_rows) // self._shards

    def free(self, alive: np.ndarray) -> list[np.ndarray]:
        """For each shard, the slots in which all completions have ended, numbered within the shard."""
        ended = ~alive.reshape(self._shards, self.each, -1).any(axis=2)
        return [np.flatnonzero(of_shard) for of_shard in ended]

    def refill(self, state: Decoding, free: Sequence[np.ndarray], most: int) -> tuple[np.ndarray, np.ndarray]:
        """Hand over the completions in free slots, at most `most` per shard, and assign these slots to waiting prompts.

        Returns:
            Members of the new prompts, `[P', G]` with `most` prompts per shard, and their slots, numbered within the
            shard. Padding gets an out-of-range slot.
        """
        filled = [(shard, slot) for shard, slots in enumerate(free) for slot in slots[:most]][: len(self.waiting)]
        numbers = [self.waiting.popleft() for _ in filled]
        at = np.asarray([shard * self.each + slot for shard, slot in filled])
        ended = np.zeros(self.request_rows.shape, bool)
        ended[at] = True
        self.give(state, ended)
        self.request_rows[at], self.begun[at] = self._rows_of(numbers), int(state.count) - 1
        lengths = np.asarray([len(prompt) for prompt in self.prompts(self.request_rows)])
        self._ahead = int(np.max(lengths - self.begun))
        prompts, slots = np.full((self._shards, most), numbers[0]), np.full((self._shards, most), self.each, np.int32)
        for shard in range(self._shards):
            of_shard = [(number, slot) for number, (owner, slot) in zip(numbers, filled, strict=True) if owner == shard]
            for place, (number, slot) in enumerate(of_shard):
                prompts[shard, place], slots[shard, place] = number, slot
        return self._rows_of(prompts.reshape(-1)), slots.reshape(-1)

    def compact(self, state: Decoding, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Hand over and drop ended completions, if that at least halves the batch size.

        Returns:
            Arguments of `decode.selected`: prompts `[P']` of each shard, the indices `[P', G']` of their completions,
            and which of these are alive. None if the batch stays as it is.
        """
        alive = alive.reshape(self.request_rows.shape)
        prompts = [np.flatnonzero(of_shard.any(axis=1)) for of_shard in np.split(alive, self._shards)]
        shape = power_of_two(max(1, *map(len, prompts))), power_of_two(alive.sum(axis=1).max())
        if 2 * self._shards * shape[0] * shape[1] > alive.size:
            return None
        self.give(state, ~alive)
        at = np.zeros((self._shards, shape[0]), np.int32)
        completions, living = np.zeros((*at.shape, shape[1]), np.int32), np.zeros((*at.shape, shape[1]), bool)
        first = np.arange(self._shards)[:, None] * self.each
        for shard, of_shard in enumerate(prompts):
            at[shard, : len(of_shard)] = of_shard
            for place, prompt in enumerate(of_shard):
                members = np.flatnonzero(alive[first[shard, 0] + prompt])
                completions[shard, place, : len(members)], living[shard, place, : len(members)] = members, True
        at, numbers = at.reshape(-1), (first + at).reshape(-1)
        completions, living = (array.reshape(-1, shape[1]) for array in (completions, living))
        self.request_rows = np.where(living, self.request_rows[numbers[:, None], completions], -1)
        self.begun = self.begun[numbers]
        return at, completions, living

    def stopped(self, state: Decoding, alive: np.ndarray, stop: StopRule) -> np.ndarray:
        """Which completions continue, bool `[P x G]`, after `stop` has read their new tokens."""
        alive, texts, lengths = alive.copy(), fetched(state.in_order()), fetched(state.lengths)
        for slot, row in enumerate(self.request_rows.reshape(-1)):
            length = int(lengths[slot])
            if row < 0 or length <= self._checked[row]:
                continue
            prompt = self._request.prompts[row // self._request.group]
            end = stop(prompt, texts[slot, :length], int(self._checked[row]))
            self._checked[row] = length
            if end is not None:
                self._ends[row], alive[slot] = end, False
        return alive

    def progress(self, state: Decoding, alive: np.ndarray) -> tuple[int, int]:
        """Number of ended completions, and number of tokens generated so far."""
        request_rows, lengths = self.request_rows.reshape(-1), self._lengths.copy()
        lengths[request_rows[request_rows >= 0]] = fetched(state.lengths)[request_rows >= 0]
        left = len(self.waiting) * self._request.group + int(alive.sum())
        return self._request.rows - left, int(lengths.sum())

    def give(self, state: Decoding, which: np.ndarray) -> None:
        """Pass the ended completions selected by `which`, bool `[P, G]`, to `done`."""
        taken = np.flatnonzero((which & (self.request_rows >= 0)).reshape(-1))
        rows, begun = self.request_rows.reshape(-1)[taken], np.repeat(self.begun, self.request_rows.shape[1])[taken]
        at = (begun[:, None] + np.arange(state.capacity)) % state.capacity
        tokens = np.take_along_axis(fetched(state.tokens)[taken], at, axis=1)
        lengths = np.minimum(fetched(state.lengths)[taken], self._ends[rows])
        logps = [None] * len(rows)
        if state.logps is not None:
            logps = np.take_along_axis(fetched(state.logps)[taken], at, axis=1)
        self._lengths[rows] = lengths
        self._done([
            Completed(int(row), ids[:length], None if row_logps is None else row_logps[:length])
            for row, ids, row_logps, length in zip(rows, tokens, logps, lengths, strict=True)
        ])  # fmt: skip

    def _rows_of(self, prompts: Sequence[int]) -> np.ndarray:
        return np.asarray(prompts, int)[:, None] * self._request.group + np.arange(self._request.group)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (int(number) - 1).bit_length()


# How many completions to generate at once


class Limit(NamedTuple):
    """Limits of a generation, for each device (or group of devices along `tensor`).

    completions: the most to generate at once; None for as many as `memory` allows.
    memory: free bytes; None if unknown, for no limit.
    """

    completions: int | None = None
    memory: int | None = None

    def after_copies(self, weights: Weights, arrays: Mapping[str, Any]) -> Limit:
        """The limit minus the memory of generation's own copies of a model's arrays. Both arguments may be shapes."""
        if self.memory is None:
            return self
        copied = [
            array
            for path, array in weights.arrays.items()
            if (array.dtype, device_bytes(array)) != (arrays[path].dtype, device_bytes(arrays[path]))
        ]
        return self._replace(memory=max(self.memory - device_bytes((copied, weights.layers)), 0))


NO_LIMIT = Limit()


def device_bytes(arrays: Any) -> int:
    """Bytes of arrays, or of their shapes, on one of the devices that they are sharded over. Host arrays count as 0."""
    leaves = [leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)]
    shapes = [leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape) for leaf in leaves]
    return sum(prod(shape) * leaf.dtype.itemsize for shape, leaf in zip(shapes, leaves, strict=True))


class Queue(NamedTuple):
    """How completions are generated a few at a time.

    slots: prompts at once, on all devices.
    parts: number of slots that the completions of a prompt are split over.
    """

    slots: int
    parts: int


class Lengths(NamedTuple):
    """Tokens per prompt and per completion that a cache has room for, rounded up. max_tokens bounds their sum."""

    prompt: int
    new: int
    max_tokens: int

    @classmethod
    def of(cls, request: Request) -> Lengths:
        """The lengths of a request's longest prompt and of its longest possible completion."""
        longest, new = padded_length(max(map(len, request.texts)), "auto"), cache_capacity(request.max_new_tokens)
        return cls(longest, new, longest + new)


def queue_of(weights: Weights, prompts: int, group: int, lengths: Lengths, limit: Limit) -> Queue | None:
    """The queue with which a generation stays within the limit; None if all completions fit at once.

    Args:
        weights: may be shapes.
        prompts, group: their number, and completions per prompt.
    """
    most = limit.completions
    if most is not None and most >= -(-prompts * group // weights.num_shards):
        return None
    if most is None:
        if limit.memory is None:
            return None
        room = SHARE * limit.memory
        if cache_bytes(weights, *_of_shard(weights, prompts, group), lengths) <= room:
            return None
    for size in _slot_sizes(group, lengths, most or group):
        slots = most // size if most is not None else int(room // cache_bytes(weights, 1, size, lengths))
        if slots:
            break
    return Queue(max(slots, 1) * weights.num_shards, group // size)


def _of_shard(weights: Weights, prompts: int, group: int) -> tuple[int, int]:
    """The prompts on one shard, and completions of each, if all are generated at once."""
    parts = part_of_group(prompts, group, weights.num_shards)
    return -(-prompts * parts // weights.num_shards), group // parts


def cache_fits(weights: Weights, prompts: int, group: int, lengths: Lengths, limit: Limit, *, held: int) -> bool:
    """Whether memory allows a cache in addition to one of `held` bytes. Other arguments as in `queue_of`."""
    if not held or limit.memory is None:
        return True
    return held + cache_bytes(weights, *_of_shard(weights, prompts, group), lengths) <= SHARE * limit.memory


def turn_fits(weights: Weights, prompts: int, group: int, lengths: Lengths, limit: Limit) -> bool:
    """Whether memory allows a cache and what `TurnCache` keeps of it. Arguments as in `queue_of`.

    When ended completions are dropped, the old cache is kept, and the new one has at most half as many completions.
    Together, the caches have at most twice the completions. Each may have all prompts, until one completion per prompt
    is left.
    """
    if limit.memory is None:
        return True
    prompts, group = _of_shard(weights, prompts, group)
    whole, alone = (cache_bytes(weights, prompts, number, lengths) for number in (group, 1))
    return 2 * whole + (group - 1).bit_length() * alone <= SHARE * limit.memory


def _slot_sizes(group: int, lengths: Lengths, most: int) -> list[int]:
    """Numbers of completions per slot to try, the best first.

    Small slots become free earlier, but each has a copy of the prompt.
    """
    sizes = [size for size in range(1, group + 1) if group % size == 0 and size <= most]
    cheap = [size for size in sizes if lengths.prompt <= _COPIES * size * lengths.new]
    best = cheap[0] if cheap else sizes[-1]
    return [size for size in reversed(sizes) if size <= best]


def cache_bytes(weights: Weights, prompts: int, group: int, lengths: Lengths) -> int:
    """Bytes of the full cache of this many prompts with `group` completions each, on one device."""
    first = min(lengths.new, FIRST_CAPACITY)
    cache = full_cache(weights, (prompts, lengths.prompt), group, (first, lengths.new), lengths.max_tokens)
    tensor = 1 if weights.shards is None else weights.shards.mesh.shape.get(TENSOR, 1)
    return sum(_bytes(entry, tensor) for part in cache.parts for entry in part)


def _bytes(entry: TokenCache | StateCache, tensor: int) -> int:
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(entry))
    return size // tensor if isinstance(entry, TokenCache) and entry.prompts.shape[-3] % tensor == 0 else size


# Requests and completions

Progress = Callable[[int, int], None]  # (completions that have ended, tokens generated so far)


class Watch(Protocol):
    """Sees every token as it is sampled."""

    def tokens(self, drawn: np.ndarray, alive: np.ndarray) -> np.ndarray | None:
        """Receive the ids `[B]` of a step. Returns which completions continue, bool `[B]`; None for all of `alive`."""


class StopRule(Protocol):
    """Ends completions by their tokens, on the host."""

    def __call__(self, prompt: np.ndarray, tokens: np.ndarray, first: int) -> int | None:
        """The number of `tokens` after which a completion of `prompt` ends; None if it continues. Tokens before `first`
        were already checked."""


@dataclass(frozen=True)
class Request:
    """Prompts to complete, with the generation options.

    prompts: token ids, at least one per prompt.
    group: completions per prompt.
    eos: ids that end a completion.
    pad: id that fills the rest of the row.
    max_new_tokens: maximum length of a completion.
    processors: logits processors, in order.
    width: left-padded length of the prompts as processors see them; None means the longest prompt.
    temperature, logps: whether to record log-probabilities, and the temperature that divides their logits.
    virtual: virtual tokens before each prompt, which processors do not see.
    images: of each prompt, if any prompt has images; not with virtual tokens.
    varies: the number of prompts varies from request to request; `slots` is rounded up to limit compilations. Only for
        prompts that are all completed at once.
    stop: ends completions in addition to `eos`. Each check by the host passes it the new tokens; tokens after the end
        of a completion are dropped.
    """

    prompts: list[np.ndarray]
    group: int
    eos: tuple[int, ...]
    pad: int
    max_new_tokens: int
    processors: tuple[Processor, ...] = ()
    width: int | None = None
    temperature: float = 1.0
    logps: bool = False
    virtual: VirtualTokens = NO_VIRTUAL_TOKENS
    images: list[TextImages] | None = None
    varies: bool = False
    stop: StopRule | None = None

    @cached_property
    def texts(self) -> list[np.ndarray]:
        """The prompts with their virtual tokens."""
        return [np.concatenate([self.virtual.ids, ids]) for ids in self.prompts] if self.virtual.count else self.prompts

    @property
    def rows(self) -> int:
        return len(self.prompts) * self.group

    @property
    def slots(self) -> int:
        """Prompts in the batch that completes all of them at once, including padding."""
        return rounded_up(len(self.prompts), 1) if self.varies else len(self.prompts)

    def in_parts(self, number: int) -> Request:
        """The same rows, with each prompt repeated `number` times and its completions split among the copies."""
        if number == 1:
            return self
        prompts = [ids for ids in self.prompts for _ in range(number)]
        images = None if self.images is None else [text for text in self.images for _ in range(number)]
        return replace(self, prompts=prompts, images=images, group=self.group // number)

    def with_completions(self, completions: Completions) -> tuple[list[np.ndarray], list[TextImages] | None]:
        """The text of each row, prompt and completion, and its images."""
        texts = [
            np.concatenate([self.texts[row // self.group], tokens[:length]])
            for row, (tokens, length) in enumerate(zip(completions.tokens, completions.lengths, strict=True))
        ]
        return texts, self.images and [images for images in self.images for _ in range(self.group)]

    def stops(self) -> Stops:
        """The stopping criteria."""
        return Stops(np.asarray(self.eos or (-1,), np.int32), np.int32(self.pad), np.int32(self.max_new_tokens))

    def sampling_inputs(self) -> SamplingInputs:
        """The sampling inputs of all rows."""
        width = self.width or max(map(len, self.prompts))
        ids = np.full((len(self.prompts), padded_length(width, "auto")), self.pad, np.int32)
        pads = np.asarray([width - len(prompt) for prompt in self.prompts], np.int32)
        for row, prompt, start in zip(ids, self.prompts, pads, strict=True):
            row[start:width] = prompt
        return SamplingInputs(
            self.processors, np.repeat(ids, self.group, axis=0), jnp.int32(width), np.repeat(pads, self.group),
            jnp.float32(self.temperature),
        )  # fmt: skip


class Completed(NamedTuple):
    """One completion.

    row: index among all completions of all prompts.
    tokens: int32 `[n]`, including the end token.
    logps: float32 `[n]`; None if not requested.
    """

    row: int
    tokens: np.ndarray
    logps: np.ndarray | None


class Completions(NamedTuple):
    """All completions, ordered by prompt.

    tokens: int32 `[B, N]`, padded to the length N of the longest completion.
    lengths: int32 `[B]`, number of tokens including the end token.
    logps: float32 `[B, N]`, log-probability of each token; None if not requested.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    logps: np.ndarray | None

    @classmethod
    def of(cls, done: Sequence[Completed], pad: int) -> Completions:
        """Collect completions that ended in any order."""
        done = sorted(done, key=lambda completed: completed.row)
        lengths = np.asarray([len(completed.tokens) for completed in done], np.int32)
        tokens = np.full((len(done), lengths.max()), pad, np.int32)
        logps = None if done[0].logps is None else np.zeros(tokens.shape, np.float32)
        for row, completed in enumerate(done):
            tokens[row, : len(completed.tokens)] = completed.tokens
            if logps is not None:
                logps[row, : len(completed.tokens)] = completed.logps
        return cls(tokens, lengths, logps)

    def rows(self) -> list[Completed]:
        """Split into single completions."""
        logps = [None] * len(self.tokens) if self.logps is None else self.logps
        return [
            Completed(row, ids[:length], None if row_logps is None else row_logps[:length])
            for row, (ids, row_logps, length) in enumerate(zip(self.tokens, logps, self.lengths, strict=True))
        ]
