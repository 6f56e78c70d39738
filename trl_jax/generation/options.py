"""Builds processors of the fields of transformers' GenerationConfig, in its order and with its checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.generation import processors, warpers
from trl_jax.generation.processors import Processor
from trl_jax.generation.sequence_biases import bad_words, sequence_biases


@dataclass(frozen=True)
class Options:
    """transformers' fields, where None is off. The second half counts where tokens are sampled.

    Raises:
        ValueError: in `logits_processors` and `sampling_processors`, where a value is out of its range.
    """

    sequence_bias: Any = None
    encoder_repetition_penalty: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    encoder_no_repeat_ngram_size: int | None = None
    bad_words_ids: list[list[int]] | None = None
    min_length: int | None = None
    min_new_tokens: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | list[int] | None = None
    remove_invalid_values: bool | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None

    temperature: float | None = None
    top_h: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None


class Text(NamedTuple):
    """The facts of a generation that processors depend on.

    eos: ids that end a text, none or more. prompt_length: tokens of the prompts with their padding. max_length: of
    prompts and new tokens. vocabulary: ids that have a score.
    """

    eos: tuple[int, ...]
    prompt_length: int
    max_length: int
    vocabulary: int


def logits_processors(options: Options, text: Text) -> dict[str, Processor]:
    """The processors that take part whether or not tokens are sampled, by their field, in transformers' order."""
    built = {name: build(options, text) for name, build in _LOGITS.items() if vars(options)[name] is not None}
    return {name: processor for name, processor in built.items() if processor is not None}


def sampling_processors(options: Options) -> dict[str, Processor]:
    """The processors of sampling alone, by their field, in transformers' order."""
    built = {name: build(vars(options)[name]) for name, build in _SAMPLING.items() if vars(options)[name] is not None}
    return {name: processor for name, processor in built.items() if processor is not None}


def _ids(ids: int | Sequence[int]) -> jax.Array:
    return jnp.asarray(np.atleast_1d(np.asarray(ids, np.int32)))


def _penalty(penalty: Any) -> float:
    if not isinstance(penalty, float) or not penalty > 0:
        raise ValueError(f"`penalty` has to be a strictly positive float, but is {penalty}")
    return penalty


def _repetition(options: Options, text: Text) -> Processor | None:
    if options.repetition_penalty == 1.0:
        return None
    return processors.RepetitionPenalty(jnp.float32(_penalty(options.repetition_penalty)))


def _prompt_repetition(options: Options, text: Text) -> Processor | None:
    if options.encoder_repetition_penalty == 1.0:
        return None
    return processors.PromptRepetitionPenalty(jnp.float32(1 / _penalty(options.encoder_repetition_penalty)))


def _ngrams(field: str, *, of_prompt: bool) -> Callable[[Options, Text], Processor | None]:
    def build(options: Options, text: Text) -> Processor | None:
        size = vars(options)[field]
        if size <= 0:
            return None
        if not isinstance(size, int):
            raise ValueError(f"`{field}` has to be a strictly positive integer, but is {size}")
        return processors.NoRepeatNGram(size, of_prompt)

    return build


def _min_length(options: Options, text: Text) -> Processor | None:
    if not text.eos or options.min_length <= 0:
        return None
    _check_count("min_length", options.min_length)
    return processors.MinLength(jnp.int32(options.min_length), _ids(text.eos))


def _min_new_tokens(options: Options, text: Text) -> Processor | None:
    if not text.eos or options.min_new_tokens <= 0:
        return None
    _check_count("min_new_tokens", options.min_new_tokens)
    return processors.MinNewTokens(jnp.int32(options.min_new_tokens), _ids(text.eos))


def _check_count(name: str, count: Any) -> None:
    if not isinstance(count, int):
        raise ValueError(f"`{name}` has to be a non-negative integer, but is {count}")


def _forced(name: str, length: int, ids: Any, text: Text) -> Processor:
    listed = _ids(ids)
    if not 0 <= listed.min() <= listed.max() < text.vocabulary:
        raise ValueError(f"`{name}` is {ids}: wanted ids of the vocabulary, from 0 to {text.vocabulary - 1}.")
    return processors.ForcedTokens(jnp.int32(length), listed)


def _exponential_decay(options: Options, text: Text) -> Processor:
    start, factor = options.exponential_decay_length_penalty
    if not text.eos or factor <= 0:
        raise ValueError(
            f"`exponential_decay_length_penalty` is ({start}, {factor}) and `eos_token_id` {list(text.eos)}: wanted a "
            "factor above 0, and an id that ends a text. Set eos_token_id, or leave the penalty out."
        )
    return processors.ExponentialDecay(jnp.int32(start), jnp.float32(np.log(factor)), _ids(text.eos))


def _begin_suppress(options: Options, text: Text) -> Processor:
    after_bos = options.forced_bos_token_id is not None
    return processors.SuppressTokensAtBegin(_ids(options.begin_suppress_tokens), jnp.asarray(after_bos))


_LOGITS: dict[str, Callable[[Options, Text], Processor | None]] = {
    "sequence_bias": lambda options, text: sequence_biases(options.sequence_bias, text.vocabulary),
    "encoder_repetition_penalty": _prompt_repetition,
    "repetition_penalty": _repetition,
    "no_repeat_ngram_size": _ngrams("no_repeat_ngram_size", of_prompt=False),
    "encoder_no_repeat_ngram_size": _ngrams("encoder_no_repeat_ngram_size", of_prompt=True),
    "bad_words_ids": lambda options, text: bad_words(options.bad_words_ids, text.eos, text.vocabulary),
    "min_length": _min_length,
    "min_new_tokens": _min_new_tokens,
    "forced_bos_token_id": lambda options, text: _forced("forced_bos_token_id", 1, options.forced_bos_token_id, text),
    "forced_eos_token_id": lambda options, text: _forced(
        "forced_eos_token_id", text.max_length - 1, options.forced_eos_token_id, text
    ),
    "remove_invalid_values": lambda options, text: (
        processors.RemoveInvalidValues() if options.remove_invalid_values is True else None
    ),
    "exponential_decay_length_penalty": _exponential_decay,
    "suppress_tokens": lambda options, text: processors.SuppressTokens(_ids(options.suppress_tokens)),
    "begin_suppress_tokens": _begin_suppress,
}


def _temperature(temperature: Any) -> Processor | None:
    if temperature == 1.0:
        return None
    if not isinstance(temperature, float) or not temperature > 0:
        zero = isinstance(temperature, float) and temperature == 0.0
        raise ValueError(
            f"`temperature` (={temperature}) has to be a strictly positive float, otherwise your next token scores "
            "will be invalid."
            + (" If you're looking for greedy decoding strategies, set `do_sample=False`." if zero else "")
        )
    return warpers.Temperature(jnp.float32(temperature))


def _top_h(top_h: Any) -> Processor:
    if not 0 < top_h <= 1:
        raise ValueError("`top_h` must be in the range (0, 1].")
    return warpers.TopH(jnp.float32(top_h))


def _top_k(top_k: Any) -> Processor | None:
    if top_k == 0:
        return None
    if not isinstance(top_k, int) or top_k < 0:
        raise ValueError(f"`top_k` has to be a strictly positive integer, but is {top_k}")
    return warpers.TopK(jnp.int32(top_k))


def _top_p(top_p: Any) -> Processor | None:
    if top_p < 0:
        raise ValueError(f"`top_p` has to be a float > 0 and < 1, but is {top_p}")
    return warpers.TopP(jnp.float32(1 - float(top_p))) if top_p < 1.0 else None


def _min_p(min_p: Any) -> Processor:
    if not 0 <= min_p <= 1.0:
        raise ValueError(f"`min_p` has to be a float in the [0, 1] interval, but is {min_p}")
    return warpers.MinP(jnp.float32(min_p))


def _typical_p(typical_p: Any) -> Processor | None:
    if typical_p <= 0:
        raise ValueError(f"`typical_p` has to be a float > 0 and < 1, but is {float(typical_p)}")
    return warpers.TypicalP(jnp.float32(typical_p)) if typical_p < 1.0 else None


_SAMPLING: dict[str, Callable[[Any], Processor | None]] = {
    "temperature": _temperature,
    "top_h": _top_h,
    "top_k": _top_k,
    "top_p": _top_p,
    "min_p": _min_p,
    "typical_p": _typical_p,
    "epsilon_cutoff": lambda epsilon: warpers.EpsilonCutoff(jnp.float32(epsilon)) if 0 < epsilon < 1 else None,
    "eta_cutoff": lambda epsilon: warpers.EtaCutoff(jnp.float32(epsilon)) if 0 < epsilon < 1 else None,
}
