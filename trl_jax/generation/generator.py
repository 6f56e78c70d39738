"""Prompts to completions, from the host's side: shapes, calls of compiled programs, and what has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trl_jax.data.layout.batch import padded_length
from trl_jax.generation.chunk import Drawing, Status, first_tokens, next_tokens
from trl_jax.generation.decode import Decoding, Stops, begun, grown, selected
from trl_jax.generation.noise import Noise, NoiseSource
from trl_jax.generation.prefill import prefill
from trl_jax.generation.processors import Processor
from trl_jax.generation.weights import layers_for_decoding, matrices_in
from trl_jax.nn.platform import platform

STEPS = 16  # of a call, after which the host looks whether completions have ended
FIRST_PLACES = 32  # places for tokens; twice as many whenever these are full


class Weights(NamedTuple):
    """A model's graph, its arrays, each layer's by itself (`layers_for_decoding`), and what it and its head compute
    in."""

    graph: Any
    arrays: dict[str, jax.Array]
    layers: list[nnx.State] | None
    dtype: Any
    head_dtype: Any

    @classmethod
    def of(
        cls, graph: Any, arrays: dict[str, jax.Array], dtype: Any = jnp.float32, head_dtype: Any = None
    ) -> Weights:
        """head_dtype: None: `dtype`."""
        dtype = jnp.dtype(dtype)
        head_dtype = dtype if head_dtype is None else jnp.dtype(head_dtype)
        arrays = matrices_in(graph, arrays, dtype, head_dtype)
        return cls(graph, arrays, layers_for_decoding(graph, arrays, platform()), dtype, head_dtype)


# (completions that have ended, tokens of all of them so far) -> None
Progress = Callable[[int, int], None]


class Watch(Protocol):
    """Sees every token as it is drawn."""

    def tokens(self, drawn: np.ndarray, alive: np.ndarray) -> np.ndarray | None:
        """Take the ids `[B]` of a step. Returns which completions go on, bool `[B]`; None: all that live."""


@dataclass(frozen=True)
class Request:
    """Prompts to complete, and how.

    prompts: token ids of each, at least one. group: completions of each.
    eos: ids that end a completion. pad: stands behind its end. max_new_tokens: of each completion, at most.
    processors: changes of the scores, in their order. width: of the prompts as processors see them, padded on the left.
    logps: whether log-probabilities are kept, of logits divided by `temperature`.
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

    @property
    def rows(self) -> int:
        return len(self.prompts) * self.group


class Completions(NamedTuple):
    """Of all rows, those of the first prompt first.

    tokens: int32 `[B, N]`, pads behind each completion's end; N is the length of the longest. lengths: int32 `[B]`,
    tokens of each, that which ends it among them. logps: float32 `[B, N]`, of each token; None where nobody asked.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    logps: np.ndarray | None


def generate(
    weights: Weights,
    request: Request,
    noise: NoiseSource | None = None,
    *,
    steps: int = STEPS,
    watch: Watch | None = None,
    progress: Progress | None = None,
) -> Completions:
    """Complete prompts.

    Args:
        noise: random numbers of chunks of `steps` steps; None takes the likeliest token each time.
        steps: tokens between two looks of the host; 1 where there is a watch.
        progress: is told after each look how far it is.
    """
    return _Generation(weights, request, noise, steps, watch).run(progress)


def places(tokens: int) -> int:
    """Places for so many tokens: one of few numbers, each of which compiles once."""
    return max(FIRST_PLACES, 1 << (tokens - 1).bit_length())


class _Generation:
    """One call of `generate`. `members` are the rows of the request that the state has, `[P', G']`, -1 where one only
    fills the shape; `used` are the steps of a chunk of random numbers that were taken."""

    def __init__(self, weights: Weights, request: Request, noise: NoiseSource | None, steps: int, watch: Watch | None):
        self._weights, self._request, self._watch = weights, request, watch
        self._source, self._chunk, self._steps, self._used = noise, None, steps, steps
        self._members = np.arange(request.rows).reshape(-1, request.group)
        self._tokens = np.full((request.rows, request.max_new_tokens), request.pad, np.int32)
        self._logps = np.zeros(self._tokens.shape, np.float32) if request.logps else None
        self._lengths = np.zeros(request.rows, np.int32)
        self._stops = Stops(
            jnp.asarray(request.eos or (-1,), jnp.int32), jnp.int32(request.pad), jnp.int32(request.max_new_tokens)
        )
        self._longest = padded_length(max(map(len, request.prompts)), "auto")
        self._drawing = _drawing(request)

    def run(self, progress: Progress | None) -> Completions:
        state, status = self._begun()
        while (alive := self._alive(state, status)).any():
            if progress is not None:
                progress(self._request.rows - int(alive.sum()), self._written(state))
            state = state._replace(alive=jnp.asarray(alive))
            state, status = self._advanced(self._compacted(state, alive), int(status.count))
        self._collect(state)
        if progress is not None:
            progress(self._request.rows, int(self._lengths.sum()))
        count = int(status.count)
        logps = None if self._logps is None else self._logps[:, :count]
        return Completions(self._tokens[:, :count], self._lengths, logps)

    def _begun(self) -> tuple[Decoding, Status]:
        """The state with the first token of each."""
        request, weights = self._request, self._weights
        tokens = np.full((len(request.prompts), self._longest), request.pad, np.int32)
        for row, ids in zip(tokens, request.prompts, strict=True):
            row[: len(ids)] = ids
        capacity = places(min(request.max_new_tokens, FIRST_PLACES))
        logits, cache = prefill(
            weights.graph, weights.arrays, tokens, np.asarray([len(ids) for ids in request.prompts], np.int32),
            group=request.group, capacity=capacity, max_tokens=self._max_tokens, dtype=weights.dtype,
            head_dtype=weights.head_dtype, by_layer=weights.layers is not None,
        )  # fmt: skip
        state = begun(cache, request.rows, capacity, logps=request.logps)
        state, status = first_tokens(logits, state, self._stops, self._noise(), self._drawing)
        self._used += 1
        return state, status

    @property
    def _max_tokens(self) -> int:
        """No prompt with its completion has more."""
        return self._longest + places(self._request.max_new_tokens)

    def _noise(self) -> Noise | None:
        """The chunk of random numbers that has those of the next step."""
        if self._source is not None and self._used == self._steps:
            changed = self._members.size < self._request.rows
            self._chunk = self._source.noise(np.maximum(self._members, 0).reshape(-1) if changed else None)
        self._used %= self._steps
        return self._chunk

    def _advanced(self, state: Decoding, count: int) -> tuple[Decoding, Status]:
        weights, noise = self._weights, self._noise()
        first, steps = self._used, self._steps - self._used
        if count + steps > state.capacity and state.capacity < self._request.max_new_tokens:
            state = grown(state, capacity=places(state.capacity + 1))
        state, status = next_tokens(
            weights.graph, weights.arrays, weights.layers, state, self._stops, noise, self._drawing, np.int32(first),
            np.int32(min(steps, state.capacity - count)), dtype=weights.dtype, head_dtype=weights.head_dtype,
            max_tokens=self._max_tokens,
        )  # fmt: skip
        self._used = self._steps
        return state, status

    def _alive(self, state: Decoding, status: Status) -> np.ndarray:
        """Which completions go on, bool `[P' x G']`: what the program says, and the watch."""
        alive = np.asarray(status.alive)
        if self._watch is None:
            return alive
        kept = self._watch.tokens(np.asarray(state.tokens[:, status.count - 1]), alive)
        return alive if kept is None else alive & kept

    def _compacted(self, state: Decoding, alive: np.ndarray) -> Decoding:
        """The state without completions that have ended, where fewer than half would be left; between chunks only, and
        not for a watch, which knows rows by their place."""
        alive = alive.reshape(self._members.shape)
        prompts = np.flatnonzero(alive.any(axis=1))
        shape = _power_of_two(len(prompts)), _power_of_two(alive.sum(axis=1).max())
        if self._watch is not None or self._used < self._steps or 2 * shape[0] * shape[1] > alive.size:
            return state
        self._collect(state)
        at, members, living = np.zeros(shape[0], np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool)
        at[: len(prompts)] = prompts
        for row, prompt in enumerate(prompts):
            own = np.flatnonzero(alive[prompt])
            members[row, : len(own)], living[row, : len(own)] = own, True
        rows = (at[:, None] * self._members.shape[1] + members).reshape(-1)
        self._members = np.where(living, self._members[at[:, None], members], -1)
        drawing = self._drawing
        self._drawing = drawing._replace(prompt_ids=drawing.prompt_ids[rows], pads=drawing.pads[rows])
        return selected(state, at, members, living)

    def _written(self, state: Decoding) -> int:
        """Tokens so far."""
        members, lengths = self._members.reshape(-1), self._lengths.copy()
        lengths[members[members >= 0]] = np.asarray(state.lengths)[members >= 0]
        return int(lengths.sum())

    def _collect(self, state: Decoding) -> None:
        """Take over what the state has of each row."""
        members = self._members.reshape(-1)
        real = members >= 0
        tokens, lengths = np.asarray(state.tokens)[real], np.asarray(state.lengths)[real]
        for row, ids, length in zip(members[real], tokens, lengths, strict=True):
            self._tokens[row, :length] = ids[:length]
        self._lengths[members[real]] = lengths
        if self._logps is not None:
            for row, logps, length in zip(members[real], np.asarray(state.logps)[real], lengths, strict=True):
                self._logps[row, :length] = logps[:length]


def _power_of_two(number: int) -> int:
    return 1 << (int(number) - 1).bit_length()


def _drawing(request: Request) -> Drawing:
    """How tokens of all rows are drawn. Prompts are as wide as the longest, or as they came."""
    width = request.width or max(map(len, request.prompts))
    ids = np.full((len(request.prompts), padded_length(width, "auto")), request.pad, np.int32)
    pads = np.asarray([width - len(prompt) for prompt in request.prompts], np.int32)
    for row, prompt, start in zip(ids, request.prompts, pads, strict=True):
        row[start:width] = prompt
    return Drawing(
        request.processors,
        jnp.asarray(np.repeat(ids, request.group, axis=0)),
        jnp.int32(width),
        jnp.asarray(np.repeat(pads, request.group)),
        jnp.float32(request.temperature),
    )
