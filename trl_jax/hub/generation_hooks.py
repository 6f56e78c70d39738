"""User callbacks during generation: streamers, stopping criteria and logits processors."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from trl_jax.generation.generator import Completions
from trl_jax.generation.sampling import History, Processor, Text
from trl_jax.hub.generation_inputs import Prompts, Settings, StopStrings
from trl_jax.hub.torch_bridge import as_array, as_tensors, is_torch

# The user's functions and requested outputs


@dataclass(frozen=True)
class GenerateOutput:
    """The result of `generate` with return_dict_in_generate=True; fields are available as attributes and keys.

    sequences: int64 `[rows, prompt + new]`.
    scores, logits: tuple of float32 `[rows, V]`, one per step: processed scores, and the model's logits; None if not
        requested.
    logprobs: float32 `[rows, new]`, log-probability of each new token under the model's logits; 0 after a text's end.
    """

    sequences: Any
    scores: tuple | None
    logits: tuple | None
    logprobs: Any

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]


class UserFunctions:
    """The user's functions, which modify scores and end texts, and a record of the per-step outputs that were
    requested."""

    def __init__(
        self,
        settings: Settings,
        prompts: Prompts,
        processors: Sequence[Callable],
        criteria: Sequence[Callable],
        prefix_allowed: Callable | None,
    ):
        self._settings, self._prompts, self._criteria = settings, prompts, criteria
        self._own, in_torch, self._failures = list(processors), prompts.in_torch, Failures()
        self._prefix = prefix_allowed and PrefixConstraint(prefix_allowed, settings.completions, in_torch)
        names = ("output_logits", "output_scores") if settings.config.return_dict_in_generate else ()
        self._recorders = {name: Recorder() for name in names if vars(settings.config)[name]}

    @contextmanager
    def processors(self, before: dict[str, Processor], behind: dict[str, Processor]) -> Iterator[tuple[Processor, ...]]:
        """All processors, ours and the user's, in the order in which they are applied."""
        functions = [UserFunction(processor, self._prompts.in_torch) for processor in self._own]
        functions += [self._prefix] if self._prefix else []
        with on_host([*functions, *self._recorders.values()], self._failures) as called:
            user_processors, rest = called[: len(self._own)], called[len(self._own) :]
            if self._prefix:
                before = in_order(before | {"prefix_allowed_tokens_fn": rest.pop(0)})
            keep = dict(zip(self._recorders, rest, strict=True))
            chain = [*merged(before, list(zip(self._own, user_processors, strict=True))), *behind.values()]
            first = [keep["output_logits"]] if "output_logits" in keep else []
            last = [keep["output_scores"]] if "output_scores" in keep else []
            yield (*first, *chain, *last)

    def watch(self, text: Text, streamer: Any, tokenizer: Any) -> StepWatch | None:
        """What to do on the host in each step; None if there is nothing to do."""
        criteria = [self._failures] if self._own or self._prefix else []
        criteria += criteria_of(self._settings.config, tokenizer)
        criteria += [UserFunction(criterion, self._prompts.in_torch) for criterion in self._criteria]
        if not (criteria or streamer is not None or self._recorders):
            return None
        scores = self._recorders["output_scores"].steps if "output_scores" in self._recorders else None
        options = {"streamer": streamer, "criteria": criteria, "scores": scores}
        return StepWatch(self._prompts, self._settings.completions, text.max_length, **options)

    def result(self, completions: Completions) -> Any:
        """The sequences, or a GenerateOutput if requested."""
        prompts = self._prompts
        sequences = prompts.sequences(completions.tokens, self._settings.completions)
        if not self._settings.config.return_dict_in_generate:
            return sequences
        recorded = {name: tuple(map(prompts.back, recorder.steps)) for name, recorder in self._recorders.items()}
        logprobs = prompts.back(completions.logps)
        return GenerateOutput(sequences, recorded.get("output_scores"), recorded.get("output_logits"), logprobs)


# Processors that compiled steps call on the host


OnHost = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (ids [B, T], scores [B, V]) -> scores
_running: dict[int, OnHost] = {}  # by number, so that another call of `generate` does not recompile
_numbers = itertools.count()

# Field of GenerationConfig -> transformers' class for it. A user's processor of that class replaces ours.
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
    """Calls a host function by its number."""

    number: jax.Array

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(scores_RV.shape, jnp.float32)
        return io_callback(_dispatch, shape, self.number, history.ids, history.length, scores_RV)


def _dispatch(number: Any, ids: Any, lengths: Any, scores: Any) -> np.ndarray:
    """Call a registered function. All rows have the same length, because rows are not replaced with host functions."""
    return _running[int(number)](np.asarray(ids)[:, : int(np.max(lengths))].astype(np.int64), np.array(scores))


class Failures:
    """Re-raises exceptions of host functions in the generation loop; compiled code would hide them."""

    def __init__(self):
        self.errors: list[Exception] = []

    def caught(self, function: OnHost) -> OnHost:
        """Wrap a function to record its exception and return scores that allow no token."""

        def call(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
            try:
                return function(ids, scores)
            except Exception as error:  # re-raised in the loop, where the user sees it
                self.errors.append(error)
                return np.full_like(scores, np.nan)

        return call

    def __call__(self, ids: np.ndarray, scores: Any) -> np.ndarray:
        """A stopping criterion that never ends a row, but raises a recorded exception."""
        if self.errors:
            raise self.errors[0]
        return np.zeros(len(ids), bool)


@contextmanager
def on_host(functions: Iterable[OnHost], failures: Failures) -> Iterator[list[HostProcessor]]:
    """Register host functions within the context and yield the processors that call them."""
    numbers = {next(_numbers): failures.caught(function) for function in functions}
    _running.update(numbers)
    try:
        yield [HostProcessor(np.int32(number)) for number in numbers]
    finally:
        for number in numbers:
            del _running[number]


class Recorder:
    """Records the scores of every step, each float32 `[B, V]`."""

    def __init__(self):
        self.steps: list[np.ndarray] = []

    def __call__(self, ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        self.steps.append(scores)
        return scores


class UserFunction:
    """Calls a user's processor or criterion with torch tensors if it is one of transformers' classes or the prompts are
    tensors, otherwise with NumPy arrays."""

    def __init__(self, function: Callable[..., Any], in_torch: bool):
        self._function = function
        self._in_torch = in_torch or any(kind.__module__.startswith("transformers.") for kind in type(function).mro())

    def __call__(self, ids: np.ndarray, scores: Any) -> np.ndarray:
        result = self._function(*(as_tensors([ids, scores]) if self._in_torch else (ids, scores)))
        return as_array(result) if is_torch(result) else np.asarray(result)


class PrefixConstraint:
    """transformers' `prefix_allowed_tokens_fn(row, ids)`, which returns a list of the allowed next ids.

    Args:
        completions: number of rows per prompt; they share the prompt's index.
    """

    def __init__(self, allowed: Callable[[int, Any], Any], completions: int, in_torch: bool):
        self._allowed, self._completions, self._in_torch = allowed, completions, in_torch

    def __call__(self, ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        mask = np.full_like(scores, -np.inf)
        for row, row_ids in enumerate(ids):
            prompt = row // self._completions
            listed = self._allowed(prompt, as_tensors(row_ids) if self._in_torch else row_ids)
            if len(listed) == 0:
                raise ValueError(
                    f"`prefix_allowed_tokens_fn` returned an empty list for batch ID {prompt}. This means that the "
                    "constraint is unsatisfiable. Please check your implementation of `prefix_allowed_tokens_fn`."
                )
            mask[row, np.asarray(listed)] = 0
        constrained = scores + mask
        impossible = np.isneginf(constrained.max(axis=1)).reshape(-1, self._completions).all(axis=1)
        return np.where(impossible.repeat(self._completions)[:, None], mask, constrained)


def merged(built: dict[str, Processor], user_processors: list[tuple[Any, Processor]]) -> list[Processor]:
    """Merge our processors by field with the user's. A user's processor of transformers' class for a field replaces
    ours; others are appended.

    Args:
        user_processors: pairs of the processor as passed and as called.
    """
    in_place = {type(passed).__name__: processor for passed, processor in user_processors}
    names = {name: _CLASSES[name] for name in built}
    chain = [in_place.get(names[name], processor) for name, processor in built.items()]
    return chain + [processor for passed, processor in user_processors if type(passed).__name__ not in names.values()]


def in_order(built: dict[str, Processor]) -> dict[str, Processor]:
    """Sort processors into transformers' order of fields."""
    return {name: built[name] for name in _CLASSES if name in built}


# Callbacks that see each token: streamers, and stopping criteria other than EOS and length


# (ids [B, T], scores) -> which rows end, bool [B] or a single bool
Criterion = Callable[[np.ndarray, Any], np.ndarray]


class MaxTime:
    """Ends all rows when a number of seconds has passed since its creation."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def __call__(self, ids: np.ndarray, scores: Any) -> np.ndarray:
        return np.full(len(ids), time.monotonic() > self._end)


def criteria_of(config: Any, tokenizer: Any) -> list[Criterion]:
    """The criteria of a GenerationConfig that are checked on the host.

    Raises:
        ValueError: there are stop strings but no tokenizer (with transformers' message).
    """
    criteria: list[Criterion] = [] if config.max_time is None else [MaxTime(config.max_time)]
    return criteria if config.stop_strings is None else [*criteria, StopStrings(config.stop_strings, tokenizer)]


class StepWatch:
    """Passes each step's tokens to a streamer and asks the criteria which rows end.

    Args:
        prompts: the prompts of the generation.
        completions: number of completions per prompt.
        max_length: maximum length of a prompt and its new tokens.
        scores: the scores of all steps so far, for the criteria; None if they are not recorded.
    """

    def __init__(
        self,
        prompts: Prompts,
        completions: int,
        max_length: int,
        *,
        streamer: Any = None,
        criteria: Sequence[Criterion] = (),
        scores: list[np.ndarray] | None = None,
    ):
        rows = prompts.ids.repeat(completions, axis=0)
        self._ids, self._length = np.pad(rows, ((0, 0), (0, max_length - prompts.width))), prompts.width
        self._prompts, self._streamer, self._criteria, self._scores = prompts, streamer, criteria, scores
        if streamer is not None:
            streamer.put(prompts.back(rows))

    def tokens(self, drawn: np.ndarray, alive: np.ndarray) -> np.ndarray:
        self._ids[:, self._length] = drawn
        self._length += 1
        if self._streamer is not None:
            self._streamer.put(self._prompts.back(drawn.astype(np.int64)))
        ends, scores = np.zeros(len(drawn), bool), None if self._scores is None else tuple(self._scores)
        for criterion in self._criteria:
            ends |= criterion(self._ids[:, : self._length], scores)
        return ~ends

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()
