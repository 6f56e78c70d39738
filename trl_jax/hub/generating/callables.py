"""A caller's own processors among ours: compiled steps call them on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from trl_jax.generation.history import History
from trl_jax.generation.processors import Processor
from trl_jax.hub.generating.prompts import is_torch
from trl_jax.hub.torch.bridge import as_array, as_tensors

OnHost = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (ids [B, T], scores [B, V]) -> scores
_running: dict[int, OnHost] = {}  # by number, so that another call of `generate` compiles nothing anew
_numbers = itertools.count()

# Field of GenerationConfig -> transformers' class for it, which a caller's processor of that class replaces.
_CLASSES = {
    "sequence_bias": "SequenceBiasLogitsProcessor",
    "encoder_repetition_penalty": "EncoderRepetitionPenaltyLogitsProcessor",
    "repetition_penalty": "RepetitionPenaltyLogitsProcessor",
    "no_repeat_ngram_size": "NoRepeatNGramLogitsProcessor",
    "encoder_no_repeat_ngram_size": "EncoderNoRepeatNGramLogitsProcessor",
    "bad_words_ids": "NoBadWordsLogitsProcessor",
    "min_length": "MinLengthLogitsProcessor",
    "min_new_tokens": "MinNewTokensLengthLogitsProcessor",
    "prefix_allowed_tokens_fn": "PrefixConstrainedLogitsProcessor",
    "forced_bos_token_id": "ForcedBOSTokenLogitsProcessor",
    "forced_eos_token_id": "ForcedEOSTokenLogitsProcessor",
    "remove_invalid_values": "InfNanRemoveLogitsProcessor",
    "exponential_decay_length_penalty": "ExponentialDecayLengthPenalty",
    "suppress_tokens": "SuppressTokensLogitsProcessor",
    "begin_suppress_tokens": "SuppressTokensAtBeginLogitsProcessor",
}


class HostProcessor(NamedTuple):
    """Calls a function of the host, by its number."""

    number: jax.Array

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(scores_RV.shape, jnp.float32)
        return io_callback(_dispatch, shape, self.number, history.ids, history.length, scores_RV)


def _dispatch(number: Any, ids: Any, lengths: Any, scores: Any) -> np.ndarray:
    """All rows are as long: none takes the place of another where functions are called."""
    return _running[int(number)](np.asarray(ids)[:, : int(np.max(lengths))].astype(np.int64), np.array(scores))


class Failures:
    """Raises in the loop what functions raised when they were called from compiled code, which would hide it."""

    def __init__(self):
        self.errors: list[Exception] = []

    def caught(self, function: OnHost) -> OnHost:
        """The function, which leaves no score to draw by where it raises."""

        def call(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
            try:
                return function(ids, scores)
            except Exception as error:  # whatever it is, it is raised again where users see it
                self.errors.append(error)
                return np.full_like(scores, np.nan)

        return call

    def __call__(self, ids: np.ndarray, scores: Any) -> np.ndarray:
        """A criterion that ends no row."""
        if self.errors:
            raise self.errors[0]
        return np.zeros(len(ids), bool)


@contextmanager
def on_host(functions: Iterable[OnHost], failures: Failures) -> Iterator[list[HostProcessor]]:
    """The processors that call these functions, for as long as it is open."""
    numbers = {next(_numbers): failures.caught(function) for function in functions}
    _running.update(numbers)
    try:
        yield [HostProcessor(np.int32(number)) for number in numbers]
    finally:
        for number in numbers:
            del _running[number]


class Recorder:
    """Keeps the scores of every step, float32 `[B, V]` each."""

    def __init__(self):
        self.steps: list[np.ndarray] = []

    def __call__(self, ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        self.steps.append(scores)
        return scores


class Called:
    """A caller's processor or criterion, given torch's tensors where it is of transformers' classes or the prompts are
    torch's, NumPy's arrays elsewhere."""

    def __init__(self, function: Callable[..., Any], in_torch: bool):
        self._function = function
        self._in_torch = in_torch or any(kind.__module__.startswith("transformers.") for kind in type(function).mro())

    def __call__(self, ids: np.ndarray, scores: Any) -> np.ndarray:
        result = self._function(*(as_tensors([ids, scores]) if self._in_torch else (ids, scores)))
        return as_array(result) if is_torch(result) else np.asarray(result)


class PrefixConstraint:
    """transformers' `prefix_allowed_tokens_fn(row, ids)`: a list of the ids that may follow.

    Args:
        completions: rows of a prompt, which share its number.
    """

    def __init__(self, allowed: Callable[[int, Any], Any], completions: int, in_torch: bool):
        self._allowed, self._completions, self._in_torch = allowed, completions, in_torch

    def __call__(self, ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        mask = np.full_like(scores, -np.inf)
        for row, own in enumerate(ids):
            prompt = row // self._completions
            listed = self._allowed(prompt, as_tensors(own) if self._in_torch else own)
            if len(listed) == 0:
                raise ValueError(
                    f"`prefix_allowed_tokens_fn` returned an empty list for batch ID {prompt}. This means that the "
                    "constraint is unsatisfiable. Please check your implementation of `prefix_allowed_tokens_fn`."
                )
            mask[row, np.asarray(listed)] = 0
        constrained = scores + mask
        impossible = np.isneginf(constrained.max(axis=1)).reshape(-1, self._completions).all(axis=1)
        return np.where(impossible.repeat(self._completions)[:, None], mask, constrained)


def merged(built: dict[str, Processor], own: list[tuple[Any, Processor]]) -> list[Processor]:
    """Our processors by field, and the caller's: one of transformers' class for a field in its place, others behind.

    Args:
        own: each as it was given, and as it is called.
    """
    in_place = {type(given).__name__: processor for given, processor in own}
    names = {name: _CLASSES[name] for name in built}
    chain = [in_place.get(names[name], processor) for name, processor in built.items()]
    return chain + [processor for given, processor in own if type(given).__name__ not in names.values()]


def in_order(built: dict[str, Processor]) -> dict[str, Processor]:
    """By transformers' order of fields."""
    return {name: built[name] for name in _CLASSES if name in built}
