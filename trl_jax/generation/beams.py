"""Beam search and beam sampling, as in transformers: each completion has several beams, and the best one is returned.

In the cache, each beam is a completion of its prompt; after each step, cache rows are reordered to the surviving
candidates. Suffixes of array names: B completions, N beams, K candidates, V vocabulary, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.data.batch import padded_length
from trl_jax.data.images import TEXT_ALONE, prompt_images
from trl_jax.generation.decode import Decoding, LastTokens, SamplingInputs, Stops, initial_state, prefill
from trl_jax.generation.generator import Completions, Progress, Request, cache_capacity
from trl_jax.generation.noise import Noise, NoiseSource
from trl_jax.generation.sampling import process
from trl_jax.generation.weights import Weights

_NEVER = -1e9  # added to scores of beams that must not be chosen, as in transformers


@dataclass(frozen=True)
class Beams:
    """Options of a search, as in transformers' GenerationConfig.

    count: beams of each completion.
    returned: how many of the best beams are returned, each as a separate completion.
    length_penalty: exponent of the length by which a beam's log-probability is divided.
    early_stopping: True stops once `count` beams have finished; False stops if a better beam is unlikely, "never" only
        if none is possible.
    """

    count: int
    returned: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False


def search(
    weights: Weights,
    request: Request,
    beams: Beams,
    noise: NoiseSource | None,
    *,
    steps: int,
    progress: Progress | None = None,
) -> tuple[Completions, int]:
    """Complete all prompts in one batch.

    Args:
        noise: for `count * V` candidates per completion, in chunks of `steps` steps; None picks the best candidates.
        progress: called after each step.

    Returns:
        The completions, and the number of steps.

    Raises:
        ValueError: the weights are sharded over devices, or texts would grow beyond the length at which LongRoPE
            changes.
    """
    _check(weights, request)
    wide = replace(request, group=request.group * beams.count)
    inputs, stops = wide.sampling_inputs(), request.stops()
    longest = max(map(len, request.texts))
    max_tokens = padded_length(longest, "auto") + cache_capacity(request.max_new_tokens)
    logits, state = _begun(weights, wide, beams, longest, max_tokens=max_tokens)
    options = {"max_tokens": max_tokens, "beams": beams, "candidates": max(2, 1 + len(request.eos)) * beams.count}
    rows, count, chunk, goes_on = np.arange(request.rows), 0, None, True
    while goes_on:
        if noise is not None and count % steps == 0:
            chunk = noise.noise(rows, np.full(len(rows), count))
        step, logits = np.int32(count % steps), None if count else logits
        state, status = _advanced(
            weights, logits, state, stops, chunk, inputs, step, np.int32(longest + count), **options
        )
        goes_on, count = bool(status.goes_on), count + 1
        if progress is not None:
            ended = request.rows - int(status.open) if goes_on else request.rows
            progress(ended, count * request.rows)
    fill = request.pad or next(iter(request.eos), 0)  # transformers treats a pad id of 0 as unset
    return state.best(beams.returned, fill), count


def _check(weights: Weights, request: Request) -> None:
    if weights.shards is not None:
        raise ValueError(
            "generate: beam search on a mesh of several devices is not in this release of trl_jax. Leave num_beams "
            "out, or use one device."
        )
    switch = weights.longrope_switch_length
    shortest, longest = (chosen(map(len, request.texts)) for chosen in (min, max))
    if switch is not None and shortest <= switch < longest + request.max_new_tokens:
        raise ValueError(
            f"generate: beam search beyond {switch} tokens, where this model's LongRoPE changes all rotations, is not "
            "in this release of trl_jax. Leave num_beams out, or keep prompts and completions within that length."
        )


class Search(NamedTuple):
    """The state between two steps.

    decoding: the running beams, `[B x N]` rows, with all their tokens.
    scores: their log-probabilities, float32 `[B, N]`.
    tokens, logps: of the best finished beams, `[B, N, T]`, the best one first; logps is None if not requested.
    lengths: their tokens, int32 `[B, N]`.
    finished_scores: float32 `[B, N]`, divided by the length.
    finished: bool `[B, N]`, whether this slot has a finished beam.
    open: bool `[B]`, whether a running beam may still become better than the finished ones.
    """

    decoding: Decoding
    scores: jax.Array
    tokens: jax.Array
    logps: jax.Array | None
    lengths: jax.Array
    finished_scores: jax.Array
    finished: jax.Array
    open: jax.Array

    def best(self, count: int, fill: int) -> Completions:
        """The `count` best finished beams of each completion, padded with `fill`."""
        lengths = np.asarray(self.lengths)[:, :count].reshape(-1)
        longest = max(1, int(lengths.max()))
        within = np.arange(longest) < lengths[:, None]

        def padded(beams: jax.Array, fill: float) -> np.ndarray:
            rows = np.asarray(beams)[:, :count, :longest].reshape(len(lengths), longest)
            return np.where(within, rows, fill).astype(rows.dtype)

        return Completions(padded(self.tokens, fill), lengths, None if self.logps is None else padded(self.logps, 0))


class Status(NamedTuple):
    """What the host reads after a step: whether the search goes on, and how many completions are open."""

    goes_on: jax.Array
    open: jax.Array


def _begun(
    weights: Weights, request: Request, beams: Beams, longest: int, *, max_tokens: int
) -> tuple[jax.Array, Search]:
    """The logits of the first token after each prompt, `[P, V]`, and the state before it."""
    texts, rows = request.texts, request.rows
    tokens = np.full((len(texts), padded_length(longest, "auto")), request.pad, np.int32)
    for row, ids in zip(tokens, texts, strict=True):
        row[: len(ids)] = ids
    lengths = np.asarray([len(ids) for ids in texts], np.int32)
    images = TEXT_ALONE if request.images is None else prompt_images(request.images, tokens.shape[1], 1)
    capacity = cache_capacity(request.max_new_tokens)
    sizes = {"group": request.group, "capacity": capacity, "max_tokens": max_tokens}
    logits, cache = prefill(weights, tokens, lengths, np.int32(longest), images, **sizes)
    decoding = initial_state(cache, np.ones(rows, bool), capacity, logps=request.logps)
    shape = rows // beams.count, beams.count
    scores, finished_scores = np.zeros(shape, np.float32), np.full(shape, _NEVER, np.float32)
    scores[:, 1:] = _NEVER  # all beams start as the prompt, so only the first one may be continued
    finished_tokens = np.full((*shape, capacity), request.pad, np.int32)
    logps = np.zeros(finished_tokens.shape, np.float32) if request.logps else None
    finished = np.zeros(shape, bool)
    return logits, Search(
        decoding, scores, finished_tokens, logps, np.zeros(shape, np.int32), finished_scores, finished, ~finished[:, 0]
    )  # fmt: skip


@partial(jax.jit, static_argnames=("max_tokens", "beams", "candidates"), donate_argnames=("search",))
def _advanced(
    weights: Weights,
    logits: jax.Array | None,
    search: Search,
    stops: Stops,
    noise: Noise | None,
    sampling: SamplingInputs,
    step: jax.Array,
    longest: jax.Array,
    *,
    max_tokens: int,
    beams: Beams,
    candidates: int,
) -> tuple[Search, Status]:
    """One step of all beams.

    Args:
        logits: `[P, V]`, the prompts' logits for the first token; None to run the model on the latest tokens.
        step: within the `noise` chunk.
        longest: int32 scalar, tokens of the longest text before this step.
        candidates: their number per completion; at least `beams.count` of them do not end.
    """
    state, new = search.decoding, None
    if logits is None:
        model = LastTokens(weights, max_tokens)
        logits, new = model(state, longest, model.angles(state, longest))
    else:
        logits = _by_prompt(logits, state)
    chosen = _candidates(logits, search, noise, step, sampling, beams, candidates)
    if new is not None:
        state = state._replace(cache=state.cache.appended(new, after=chosen.ids))
    return _with_candidates(search._replace(decoding=state), chosen, stops, beams)


def _by_prompt(values: jax.Array, state: Decoding) -> jax.Array:
    """`[P, ...]` repeated for the beams of each prompt."""
    return jnp.repeat(values, len(state.tokens) // len(values), axis=0)


class Candidates(NamedTuple):
    """Continuations of the beams, `[B, K]`, the likeliest first.

    scores: log-probabilities of the whole completions.
    beam: which beam each continues.
    ids: their new tokens.
    logps: log-probabilities of the new tokens; None if not requested.
    """

    scores: jax.Array
    beam: jax.Array
    ids: jax.Array
    logps: jax.Array | None


def _candidates(
    logits: jax.Array,
    search: Search,
    noise: Noise | None,
    step: jax.Array,
    sampling: SamplingInputs,
    beams: Beams,
    count: int,
) -> Candidates:
    """The best of all continuations or, with noise, continuations sampled without replacement as by
    torch.multinomial."""
    state, vocabulary = search.decoding, logits.shape[1]
    logps = jax.nn.log_softmax(logits, axis=-1)
    scores = process(sampling.processors, sampling.history(state), logps) if sampling.processors else logps
    total = scores.reshape(-1, beams.count, vocabulary) + search.scores[..., None]
    total = total.reshape(-1, beams.count * vocabulary)
    if noise is None:
        best, at = jax.lax.top_k(total, count)
    else:
        q = noise.exponentials(step, total.shape[1])
        drawn = jax.lax.optimization_barrier(jax.nn.softmax(total, axis=-1) / q)
        at = jax.lax.top_k(drawn, count)[1]
        best = jnp.take_along_axis(total, at, axis=1)
        order = jnp.argsort(-best, axis=1)
        best, at = (jnp.take_along_axis(array, order, axis=1) for array in (best, at))
    beam, ids = at // vocabulary, (at % vocabulary).astype(jnp.int32)
    ids = jnp.where(jnp.isnan(total).any(axis=1, keepdims=True), -1, ids)
    if state.logps is None:
        return Candidates(best, beam, ids, None)
    scaled = jax.nn.log_softmax(logits / sampling.temperature, axis=-1).reshape(total.shape)
    return Candidates(best, beam, ids, jnp.take_along_axis(scaled, at, axis=1))


def _with_candidates(search: Search, chosen: Candidates, stops: Stops, beams: Beams) -> tuple[Search, Status]:
    state, count = search.decoding, beams.count
    length = state.count + 1  # length of the candidates
    ended = (chosen.ids[..., None] == stops.eos).any(axis=-1) | (length >= stops.max_new) | (chosen.ids < 0)

    def of_candidates(rows: jax.Array, new: jax.Array) -> jax.Array:
        """The rows `[B x N, T]` of the beams that the candidates continue, with the new value: `[B, K, T]`."""
        rows = jnp.take_along_axis(rows.reshape(-1, count, rows.shape[1]), chosen.beam[..., None], axis=1)
        return rows.at[:, :, state.count].set(new.astype(rows.dtype))

    tokens = of_candidates(state.tokens, chosen.ids)
    logps = None if state.logps is None else of_candidates(state.logps, chosen.logps)

    # Running beams
    running, at = jax.lax.top_k(chosen.scores + ended * jnp.float32(_NEVER), count)
    beam = jnp.take_along_axis(chosen.beam, at, axis=1)
    decoding = _reordered(state, beam)._replace(
        tokens=_taken(tokens, at).reshape(state.tokens.shape),
        logps=None if logps is None else _taken(logps, at).reshape(state.tokens.shape),
        count=length,
    )

    # The best finished beams, old and new
    just = ended & (jnp.arange(ended.shape[1]) < count)
    scores = chosen.scores / length.astype(jnp.float32) ** beams.length_penalty
    full = search.finished.all(axis=1, keepdims=True) & (beams.early_stopping is True)
    for excluded in (full, ~search.open[:, None], ~just):
        scores = scores + excluded * jnp.float32(_NEVER)
    lengths = jnp.full(ended.shape, length)
    old = search.tokens, search.logps, search.lengths, search.finished_scores, search.finished
    both = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), old, (tokens, logps, lengths, scores, just))
    best = jax.lax.top_k(both[3], count)[1]
    finished = jax.tree.map(lambda values: _taken(values, best), both)

    penalized = beams.length_penalty > 0 and beams.early_stopping == "never"
    reached = (stops.max_new if penalized else length).astype(jnp.float32) ** beams.length_penalty
    worst = jnp.where(finished[4], finished[3].min(axis=1, keepdims=True), _NEVER)
    is_open = search.open & (running[:, :1] / reached > worst).any(axis=1)
    goes_on = is_open.any() & ~ended.all()
    if beams.early_stopping is True:
        goes_on &= ~finished[4].all()
    return Search(decoding, running, *finished, is_open), Status(goes_on, is_open.sum())


def _taken(values: jax.Array, at: jax.Array) -> jax.Array:
    """`values` `[B, K, ...]` at `at` `[B, N]`."""
    return jnp.take_along_axis(values, at.reshape(*at.shape, *[1] * (values.ndim - 2)), axis=1)


def _reordered(state: Decoding, beam: jax.Array) -> Decoding:
    """Reorder the cache: row n of each completion gets the cache of its beam `beam[:, n]`, `[B, N]`."""
    prompts = len(state.cache.fill.prompt_lengths)
    first = jnp.arange(len(beam))[:, None] * beam.shape[1]
    members = (first + beam).reshape(prompts, -1) % (len(state.tokens) // prompts)

    def select(array: jax.Array, axis: int, per_completion: bool) -> jax.Array:
        return array[(slice(None),) * axis + (jnp.arange(prompts)[:, None], members)] if per_completion else array

    return state._replace(cache=state.cache.selected(select))
