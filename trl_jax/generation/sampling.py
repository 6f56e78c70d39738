"""transformers' logits processors and warpers, vectorized in JAX.

Suffixes of array names: R rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

# Build processors from the fields of transformers' GenerationConfig, in its order and with its checks


@dataclass(frozen=True)
class Options:
    """Fields of transformers' GenerationConfig; None is off. The second group only applies when sampling.

    Values are checked in `logits_processors` and `sampling_processors`, which raise ValueError.
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
    """The properties of a generation that processors depend on.

    eos: ids that end a text, possibly none.
    prompt_length: padded length of the prompts.
    max_length: maximum number of tokens, prompt included.
    vocabulary: number of ids that have a score.
    """

    eos: tuple[int, ...]
    prompt_length: int
    max_length: int
    vocabulary: int


def logits_processors(options: Options, text: Text) -> dict[str, Processor]:
    """Processors that apply to both greedy decoding and sampling, by field, in transformers' order."""
    built = {name: build(options, text) for name, build in _LOGITS.items() if vars(options)[name] is not None}
    return {name: processor for name, processor in built.items() if processor is not None}


def sampling_processors(options: Options, least: int = 1) -> dict[str, Processor]:
    """Processors that only apply to sampling, by field, in transformers' order.

    Args:
        least: how many of the likeliest ids each processor keeps at least, for beam search. Not for `top_h` and
            `typical_p`.
    """
    built = {name: build(vars(options)[name]) for name, build in _SAMPLING.items() if vars(options)[name] is not None}
    built = {name: processor for name, processor in built.items() if processor is not None}
    if least == 1:
        return built
    return {name: warper if name == "temperature" else KeepsLargest(warper, least) for name, warper in built.items()}


def _ids(ids: int | Sequence[int]) -> jax.Array:
    return jnp.asarray(np.atleast_1d(np.asarray(ids, np.int32)))


def _penalty(penalty: Any) -> float:
    if not isinstance(penalty, float) or not penalty > 0:
        raise ValueError(f"`penalty` has to be a strictly positive float, but is {penalty}")
    return penalty


def _repetition(options: Options, text: Text) -> Processor | None:
    if options.repetition_penalty == 1.0:
        return None
    return RepetitionPenalty(jnp.float32(_penalty(options.repetition_penalty)))


def _prompt_repetition(options: Options, text: Text) -> Processor | None:
    if options.encoder_repetition_penalty == 1.0:
        return None
    return PromptRepetitionPenalty(jnp.float32(1 / _penalty(options.encoder_repetition_penalty)))


def _ngrams(field: str, *, of_prompt: bool) -> Callable[[Options, Text], Processor | None]:
    def build(options: Options, text: Text) -> Processor | None:
        size = vars(options)[field]
        if size <= 0:
            return None
        if not isinstance(size, int):
            raise ValueError(f"`{field}` has to be a strictly positive integer, but is {size}")
        return NoRepeatNGram(size, of_prompt)

    return build


def _min_length(options: Options, text: Text) -> Processor | None:
    if not text.eos or options.min_length <= 0:
        return None
    _check_count("min_length", options.min_length)
    return MinLength(jnp.int32(options.min_length), _ids(text.eos))


def _min_new_tokens(options: Options, text: Text) -> Processor | None:
    if not text.eos or options.min_new_tokens <= 0:
        return None
    _check_count("min_new_tokens", options.min_new_tokens)
    return MinNewTokens(jnp.int32(options.min_new_tokens), _ids(text.eos))


def _check_count(name: str, count: Any) -> None:
    if not isinstance(count, int):
        raise ValueError(f"`{name}` has to be a non-negative integer, but is {count}")


def _forced(name: str, length: int, ids: Any, text: Text) -> Processor:
    listed = _ids(ids)
    if not 0 <= listed.min() <= listed.max() < text.vocabulary:
        raise ValueError(f"`{name}` must be token ids from 0 to {text.vocabulary - 1}, got {ids}.")
    return ForcedTokens(jnp.int32(length), listed)


def _exponential_decay(options: Options, text: Text) -> Processor:
    start, factor = options.exponential_decay_length_penalty
    if not text.eos or factor <= 0:
        raise ValueError(
            "`exponential_decay_length_penalty` must have a factor above 0, and `eos_token_id` at least one id, got "
            f"({start}, {factor}) and {list(text.eos)}. Set eos_token_id, or leave the penalty out."
        )
    return ExponentialDecay(jnp.int32(start), jnp.float32(np.log(factor)), _ids(text.eos))


def _begin_suppress(options: Options, text: Text) -> Processor:
    after_bos = options.forced_bos_token_id is not None
    return SuppressTokensAtBegin(_ids(options.begin_suppress_tokens), jnp.asarray(after_bos))


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
        RemoveInvalidValues() if options.remove_invalid_values is True else None
    ),
    "exponential_decay_length_penalty": _exponential_decay,
    "suppress_tokens": lambda options, text: SuppressTokens(_ids(options.suppress_tokens)),
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
    return Temperature(jnp.float32(temperature))


def _top_h(top_h: Any) -> Processor:
    if not 0 < top_h <= 1:
        raise ValueError("`top_h` must be in the range (0, 1].")
    return TopH(jnp.float32(top_h))


def _top_k(top_k: Any) -> Processor | None:
    if top_k == 0:
        return None
    if not isinstance(top_k, int) or top_k < 0:
        raise ValueError(f"`top_k` has to be a strictly positive integer, but is {top_k}")
    return TopK(jnp.int32(top_k))


def _top_p(top_p: Any) -> Processor | None:
    if top_p < 0:
        raise ValueError(f"`top_p` has to be a float > 0 and < 1, but is {top_p}")
    return TopP(jnp.float32(1 - float(top_p))) if top_p < 1.0 else None


def _min_p(min_p: Any) -> Processor:
    if not 0 <= min_p <= 1.0:
        raise ValueError(f"`min_p` has to be a float in the [0, 1] interval, but is {min_p}")
    return MinP(jnp.float32(min_p))


def _typical_p(typical_p: Any) -> Processor | None:
    if typical_p <= 0:
        raise ValueError(f"`typical_p` has to be a float > 0 and < 1, but is {float(typical_p)}")
    return TypicalP(jnp.float32(typical_p)) if typical_p < 1.0 else None


_SAMPLING: dict[str, Callable[[Any], Processor | None]] = {
    "temperature": _temperature,
    "top_h": _top_h,
    "top_k": _top_k,
    "top_p": _top_p,
    "min_p": _min_p,
    "typical_p": _typical_p,
    "epsilon_cutoff": lambda epsilon: EpsilonCutoff(jnp.float32(epsilon)) if 0 < epsilon < 1 else None,
    "eta_cutoff": lambda epsilon: EtaCutoff(jnp.float32(epsilon)) if 0 < epsilon < 1 else None,
}


# Processors that only apply to sampling (transformers' warpers)

_TOP_H_IDS = 100  # number of ids that TopH considers, as in transformers


def mask_scores(kept_RV: jax.Array, scores_RV: jax.Array) -> jax.Array:
    """Set the scores of ids that are not kept to -inf."""
    return jnp.where(kept_RV, scores_RV, -jnp.inf)


def is_first_largest(scores_RV: jax.Array) -> jax.Array:
    """Marks the first maximum of each row: bool `[R, V]`."""
    return jnp.arange(scores_RV.shape[-1]) == jnp.argmax(scores_RV, axis=-1, keepdims=True)


def entropy(scores_RV: jax.Array) -> jax.Array:
    """Entropy in nats, `[R, 1]`."""
    logp_RV = jax.nn.log_softmax(scores_RV, axis=-1)
    p_RV = jnp.exp(logp_RV)
    return -jnp.where(p_RV > 0, p_RV * logp_RV, 0).sum(axis=-1, keepdims=True)


class Temperature(NamedTuple):
    """Divides the scores by a temperature."""

    temperature: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        return scores_RV / self.temperature


@functools.partial(jax.tree_util.register_dataclass, data_fields=["processor"], meta_fields=["least"])
@dataclass(frozen=True)
class KeepsLargest:
    """Applies a processor, but keeps the `least` largest scores."""

    processor: Processor
    least: int

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        return jnp.where(among_largest(scores_RV, self.least), scores_RV, self.processor(history, scores_RV))


class TopH(NamedTuple):
    """Keeps the likeliest of the top 100 ids as long as their share of the entropy is at most `top_h`.

    Potraghloo et al. 2025, arXiv:2509.02510.
    """

    top_h: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        first_RV = leading_mask(-scores_RV, jnp.ones_like(scores_RV), _TOP_H_IDS)
        top_RV = mask_scores(first_RV, scores_RV)
        p_RV = jax.nn.softmax(top_RV, axis=-1)
        terms_RV = jnp.where(p_RV > 0, -p_RV * jnp.log(p_RV), 0)
        within_RV = leading_mask(-top_RV, terms_RV, entropy(top_RV) * self.top_h) & (p_RV > 0)
        return mask_scores(within_RV | is_first_largest(scores_RV), scores_RV)


class TopK(NamedTuple):
    """Keeps the `top_k` largest scores, and ties with the smallest of these (Fan et al. 2018, arXiv:1805.04833)."""

    top_k: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        return mask_scores(among_largest(scores_RV, self.top_k), scores_RV)


class TopP(NamedTuple):
    """Removes the least likely ids with total probability at most `tail` = 1 - top_p.

    Among ties, later ids are kept. Holtzman et al. 2019, arXiv:1904.09751.
    """

    tail: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        removed_RV = leading_mask(scores_RV, jax.nn.softmax(scores_RV, axis=-1), self.tail)

        def but_for_the_last():
            places, largest_R1 = jnp.arange(scores_RV.shape[-1]), scores_RV.max(axis=-1, keepdims=True)
            last_R1 = jnp.where(scores_RV >= largest_R1, places, -1).max(axis=-1, keepdims=True)
            return removed_RV & (places != last_R1)

        return mask_scores(~jax.lax.cond(self.tail > 0.99, but_for_the_last, lambda: removed_RV), scores_RV)


class MinP(NamedTuple):
    """Keeps ids with at least `min_p` times the largest probability (Nguyen et al. 2024, arXiv:2407.01082)."""

    min_p: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        p_RV = jax.nn.softmax(scores_RV, axis=-1)
        return mask_scores(p_RV >= self.min_p * p_RV.max(axis=-1, keepdims=True), scores_RV)


class TypicalP(NamedTuple):
    """Keeps the ids whose surprisal is closest to the entropy, up to total probability `typical_p`.

    Meister et al. 2022, arXiv:2202.00666.
    """

    typical_p: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        logp_RV = jax.nn.log_softmax(scores_RV, axis=-1)
        distance_RV = jnp.abs(-logp_RV - entropy(scores_RV))
        return mask_scores(until_mask(distance_RV, jax.nn.softmax(scores_RV, axis=-1), self.typical_p), scores_RV)


class EpsilonCutoff(NamedTuple):
    """Removes ids with probability below `epsilon`, except the likeliest (Hewitt et al. 2022, arXiv:2210.15191)."""

    epsilon: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        return _cut(scores_RV, self.epsilon)


class EtaCutoff(NamedTuple):
    """Removes ids with probability below min(epsilon, sqrt(epsilon) exp(-entropy)), except the likeliest.

    Hewitt et al. 2022, arXiv:2210.15191.
    """

    epsilon: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        return _cut(scores_RV, jnp.minimum(self.epsilon, jnp.sqrt(self.epsilon) * jnp.exp(-entropy(scores_RV))))


def _cut(scores_RV: jax.Array, least: jax.Array) -> jax.Array:
    likely_RV = jax.nn.softmax(scores_RV, axis=-1) >= least
    return mask_scores(likely_RV | (scores_RV >= scores_RV.max(axis=-1, keepdims=True)), scores_RV)


class Renormalize(NamedTuple):
    """Normalizes the scores to log-probabilities, after all other processors."""

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(scores_RV, axis=-1)


# `sequence_bias` and `bad_words_ids`, with transformers' checks and messages


def sequence_biases(biases: Any, vocabulary: int) -> SequenceBias:
    """Parse `{(10, 45): -2.0, (64,): -7.5}` or `[[[10, 45], -2.0], [[64], -7.5]]`.

    Raises:
        ValueError: the format is invalid, or an id is outside the vocabulary.
    """
    if not isinstance(biases, dict | list) or not biases:
        raise ValueError(
            f"`sequence_bias` has to be a non-empty dictionary, or non-empty list of lists but is {biases}."
        )
    if isinstance(biases, dict):
        _check_dict(biases)
    elif not all(_is_listed(entry) for entry in biases):
        raise ValueError(
            "Each element in `sequence_bias` has to be a non-empty list of lists of positive integers and float, but "
            f"is {biases}."
        )
    else:
        biases = {tuple(ids): bias for ids, bias in biases}
    outside = [id_ for ids in biases for id_ in ids if id_ >= vocabulary]
    if outside:
        raise ValueError(
            f"The model vocabulary size is {vocabulary}, but the following tokens were being biased: {outside}"
        )
    return SequenceBias.of(biases)


def bad_words(words: Any, eos: tuple[int, ...], vocabulary: int) -> SequenceBias | None:
    """Parse `bad_words_ids` as biases of -inf. EOS ids are not banned; None if no others remain.

    Raises:
        ValueError: not a list of lists of ids.
    """
    if not isinstance(words, list) or not words:
        raise ValueError(f"`bad_words_ids` has to be a non-empty list, but is {words}.")
    if not all(isinstance(ids, list) for ids in words):
        raise ValueError(f"`bad_words_ids` has to be a list of lists, but is {words}.")
    if not all(ids and _are_ids(ids) for ids in words):
        raise ValueError(f"Each list in `bad_words_ids` has to be a list of positive integers, but is {words}.")
    banned = {tuple(ids): float("-inf") for ids in words if ids not in [[id_] for id_ in eos]}
    return sequence_biases(banned, vocabulary) if banned else None


def _check_dict(biases: dict[Any, Any]) -> None:
    if not all(isinstance(ids, tuple) for ids in biases):
        raise ValueError(f"`sequence_bias` has to be a dict with tuples as keys, but is {biases}.")
    if not all(ids and _are_ids(ids) for ids in biases):
        raise ValueError(
            f"Each key in `sequence_bias` has to be a non-empty tuple of positive integers, but is {biases}."
        )
    if not all(isinstance(bias, float) for bias in biases.values()):
        raise ValueError(f"`sequence_bias` has to be a dict with floats as values, but is {biases}.")


def _is_listed(entry: Any) -> bool:
    match entry:
        case [list(ids), float()]:
            return bool(ids) and _are_ids(ids)
    return False


def _are_ids(ids: Iterable[Any]) -> bool:
    return all(isinstance(id_, int | np.integer) and id_ >= 0 for id_ in ids)


# Processors that apply to both greedy decoding and sampling


class Processor(Protocol):
    """Modifies the scores `[R, V]` of the next token."""

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array: ...


def process(processors: Sequence[Processor], history: History, scores_RV: jax.Array) -> jax.Array:
    """Apply the processors in order."""
    for processor in processors:
        scores_RV = processor(history, scores_RV)
    return scores_RV


def ids_mask(ids: jax.Array, vocabulary: int) -> jax.Array:
    """Mask of the given ids: bool `[V]`; ids outside the vocabulary are ignored."""
    ids = jnp.where(ids < 0, vocabulary, ids)
    return jnp.zeros(vocabulary, jnp.bool_).at[ids].set(True, mode="drop")


def seen_mask(ids_RT: jax.Array, counts_RT: jax.Array, vocabulary: int) -> jax.Array:
    """Mask of the ids that occur in each row at positions where `counts_RT` is True: bool `[R, V]`; ids outside the
    vocabulary are ignored."""
    ids_RT = jnp.where(counts_RT & (ids_RT >= 0), ids_RT, vocabulary)
    rows_R1 = jnp.arange(ids_RT.shape[0])[:, None]
    return jnp.zeros((ids_RT.shape[0], vocabulary), jnp.bool_).at[rows_R1, ids_RT].set(True, mode="drop")


class SequenceBias(NamedTuple):
    """Adds a bias to the last id of each sequence whose other ids are the latest tokens; -inf bans a word.

    prefixes: int32 `[n, longest - 1]`, each sequence without its last id, left-padded with -2.
    last: int32 `[n]`, last id of each sequence.
    bias: float32 `[n]`.
    """

    prefixes: jax.Array
    last: jax.Array
    bias: jax.Array

    @classmethod
    def of(cls, biases: dict[tuple[int, ...], float]) -> SequenceBias:
        """Build from a dict of id sequences and biases."""
        longest = max(map(len, biases))
        prefixes = [[-2] * (longest - len(ids)) + list(ids[:-1]) for ids in biases]
        return cls(
            jnp.asarray(np.array(prefixes, np.int32).reshape(len(biases), longest - 1)),
            jnp.asarray([ids[-1] for ids in biases], jnp.int32),
            jnp.asarray(list(biases.values()), jnp.float32),
        )

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        before_R1P = history.last(self.prefixes.shape[1])[:, None]
        begun_RN = ((before_R1P == self.prefixes) | (self.prefixes == -2)).all(axis=-1)
        bias_RN = jnp.where(begun_RN, self.bias, 0.0)
        return scores_RV + jnp.zeros_like(scores_RV).at[:, self.last].add(bias_RN)


class RepetitionPenalty(NamedTuple):
    """Divides positive scores of ids that already occur by `penalty`, and multiplies negative ones by it.

    Tokens of the prompt are included, its padding is not. Keskar et al. 2019, arXiv:1909.05858.
    """

    penalty: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        places = jnp.arange(history.ids.shape[1])
        counts_RT = (places >= history.pads[:, None]) & (places < history.lengths)
        return _penalized(history, counts_RT, self.penalty, scores_RV)


class PromptRepetitionPenalty(NamedTuple):
    """`RepetitionPenalty` for ids of the prompt only, padding included. transformers' `encoder_repetition_penalty` is
    1 / `penalty`."""

    penalty: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        places = jnp.arange(history.ids.shape[1])
        return _penalized(history, places < history.lengths - history.new, self.penalty, scores_RV)


def _penalized(history: History, counts_RT: jax.Array, penalty: Number, scores_RV: jax.Array) -> jax.Array:
    counts_RT = jnp.broadcast_to(counts_RT, history.ids.shape)
    penalized_RV = jnp.where(scores_RV < 0, scores_RV * penalty, scores_RV / penalty)
    return jnp.where(seen_mask(history.ids, counts_RT, scores_RV.shape[-1]), penalized_RV, scores_RV)


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("size", "of_prompt"))
@dataclasses.dataclass(frozen=True)
class NoRepeatNGram:
    """Removes ids that would complete an n-gram of `size` tokens that already occurs in the row, or in its prompt if
    `of_prompt`; padding is included. Both fields are static."""

    size: int
    of_prompt: bool = False

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        ids_RT, before = history.ids, self.size - 1
        if ids_RT.shape[1] < self.size:
            return scores_RV
        ends = jnp.arange(ids_RT.shape[1] - before) + self.size
        within = ends <= (history.lengths - history.new if self.of_prompt else history.lengths)
        begun_RN = jnp.broadcast_to(within, (len(ids_RT), len(ends)))
        suffix_RB = history.last(before)
        for i in range(before):
            begun_RN &= ids_RT[:, i : ids_RT.shape[1] - before + i] == suffix_RB[:, i, None]
        return jnp.where(seen_mask(ids_RT[:, before:], begun_RN, scores_RV.shape[-1]), -jnp.inf, scores_RV)


class MinLength(NamedTuple):
    """Removes the EOS ids while the row (prompt, padding and new tokens) has fewer than `length` tokens."""

    length: Number
    eos: jax.Array

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        removed_RV = (history.lengths < self.length) & ids_mask(self.eos, scores_RV.shape[-1])
        return jnp.where(removed_RV, -jnp.inf, scores_RV)


class MinNewTokens(NamedTuple):
    """Removes the EOS ids while there are fewer than `count` new tokens."""

    count: Number
    eos: jax.Array

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        removed_RV = (history.new < self.count) & ids_mask(self.eos, scores_RV.shape[-1])
        return jnp.where(removed_RV, -jnp.inf, scores_RV)


class ForcedTokens(NamedTuple):
    """Keeps only `ids` when a row has `length` tokens: forces the first token, or the last before max_length."""

    length: Number
    ids: jax.Array

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        forced_V = jnp.where(ids_mask(self.ids, scores_RV.shape[-1]), 0.0, -jnp.inf)
        return jnp.where(history.lengths == self.length, forced_V, scores_RV)


class RemoveInvalidValues(NamedTuple):
    """Replaces NaN by 0, and infinities by the largest and smallest float32."""

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        limits = jnp.finfo(jnp.float32)
        return jnp.nan_to_num(scores_RV, nan=0.0, posinf=limits.max, neginf=limits.min)


class ExponentialDecay(NamedTuple):
    """Adds |score| * (factor^n - 1) to the scores of the EOS ids, where n is the number of new tokens after the first
    `start`."""

    start: Number
    log_factor: Number
    eos: jax.Array

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        behind = history.new - self.start
        growth = jnp.expm1(behind * self.log_factor)
        raised_RV = (behind > 0) & ids_mask(self.eos, scores_RV.shape[-1]) & jnp.isfinite(scores_RV)
        return scores_RV + jnp.where(raised_RV, jnp.abs(scores_RV) * growth, 0.0)


class SuppressTokens(NamedTuple):
    """Removes ids."""

    ids: jax.Array

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        return jnp.where(ids_mask(self.ids, scores_RV.shape[-1]), -jnp.inf, scores_RV)


class SuppressTokensAtBegin(NamedTuple):
    """Removes ids as the first new token; with `after_bos`, as the second new token after a prompt of one token."""

    ids: jax.Array
    after_bos: jax.Array | bool

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        begin = jnp.where((history.lengths - history.new <= 1) & self.after_bos, 1, 0)
        removed_RV = (history.new == begin) & ids_mask(self.ids, scores_RV.shape[-1])
        return jnp.where(removed_RV, -jnp.inf, scores_RV)


# Previous tokens

Number = jax.Array | float


class History(NamedTuple):
    """The tokens before a step as processors see them: left-padded prompts followed by new tokens. A pytree.

    ids: int32 `[R, T]`; columns from `length` on are ignored, so T can stay constant over steps.
    length: number of columns before this step, int32 `[]` or `[R]`; traced.
    prompt_length: columns of the padded prompt, int32 `[]` or `[R]`.
    pads: padding columns on the left of each row, int32 `[R]`.
    """

    ids: jax.Array
    length: jax.Array
    prompt_length: jax.Array
    pads: jax.Array

    @property
    def lengths(self) -> jax.Array:
        """`length`, as `[R, 1]` or `[1, 1]`."""
        return jnp.reshape(self.length, (-1, 1))

    @property
    def new(self) -> jax.Array:
        """Number of new tokens, as `[R, 1]` or `[1, 1]`."""
        return self.lengths - jnp.reshape(self.prompt_length, (-1, 1))

    def last(self, count: int) -> jax.Array:
        """The last `count` tokens of each row, int32 `[R, count]`; -1 before the start of the row."""
        places = self.lengths - count + jnp.arange(count)
        places = jnp.broadcast_to(places, (self.ids.shape[0], count))
        return jnp.where(places >= 0, jnp.take_along_axis(self.ids, jnp.maximum(places, 0), axis=1), -1)


# Thresholds without sorting: a binary search over the bits of the threshold, where each step counts or sums the ids
# beyond it.

_SIGN = np.uint32(2**31)
_LEAST = np.iinfo(np.int32).min
_BLOCK = 16  # ids per block
_FEW = 16  # if at most 1 in _FEW blocks matters, only those are searched
_WORTHWHILE = 32  # minimum number of such blocks; smaller vocabularies are searched entirely


def among_largest(x_RV: jax.Array, k: jax.Array | int) -> jax.Array:
    """Mask of the k largest values of each row, and of ties with the k-th: bool `[R, V]`.

    The k largest values are in the k blocks with the largest maxima.
    """
    keys_RV = _keys(x_RV)
    k = jnp.minimum(k, x_RV.shape[-1])
    tops_RB = _blocks(keys_RV, _LEAST).max(axis=1)
    least_R1 = _largest(lambda t_R1: _total(tops_RB >= t_R1) >= k, x_RV.shape[0])

    def kth(keys):
        return _largest(lambda t_R1: _total(keys >= t_R1) >= k, x_RV.shape[0])

    return keys_RV >= _of_blocks(kth, tops_RB >= least_R1, (keys_RV, _LEAST))


def leading_mask(order_RV: jax.Array, weights_RV: jax.Array, limit: jax.Array | float) -> jax.Array:
    """Mask of the leading ids whose cumulative weight is at most `limit`: bool `[R, V]`.

    Args:
        order_RV: ids are sorted by this, ascending; ties by index.
        weights_RV: at least 0, and equal for ties in `order_RV`. The result for ids of weight 0 is unspecified.
        limit: a number, or `[R, 1]`.
    """
    keys_RV = _keys(order_RV)
    t_R1, equals_R1 = _where_weights_reach(keys_RV, weights_RV, lambda before_R1: before_R1 <= limit)

    def some_of_equals():
        less_RV, equal_RV = keys_RV < t_R1, keys_RV == t_R1
        before_R1 = _total(jnp.where(less_RV, weights_RV, 0))
        return less_RV | (equal_RV & (before_R1 + jnp.cumsum(equal_RV, axis=-1) * weights_RV <= limit))

    return jax.lax.cond(jnp.any(equals_R1 > 1), some_of_equals, lambda: keys_RV < t_R1)


def until_mask(order_RV: jax.Array, weights_RV: jax.Array, mass: jax.Array | float) -> jax.Array:
    """Mask of the shortest run of leading ids, ascending by `order_RV`, with total weight at least `mass`: bool
    `[R, V]`.

    Includes ties with the last id of the run. If the total weight is below `mass`, all ids are included.
    """
    keys_RV = _keys(order_RV)
    t_R1, _ = _where_weights_reach(keys_RV, weights_RV, lambda before_R1: before_R1 < mass)
    return keys_RV <= t_R1


def _where_weights_reach(
    keys_RV: jax.Array, weights_RV: jax.Array, short_of: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The largest key for which the weights of all smaller keys satisfy `short_of`, and the number of ids of positive
    weight with this key, each `[R, 1]`."""

    def search(keys, weights):
        t_R1 = _largest(lambda t_R1: short_of(_total(jnp.where(keys < t_R1, weights, 0))), keys.shape[0])
        return t_R1, _total((keys == t_R1) & (weights > 0))

    heavy_RB = _blocks(weights_RV, 0).max(axis=1) > 0
    return _of_blocks(search, heavy_RB, (keys_RV, _LEAST), (weights_RV, 0))


def _largest(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The largest key of each row for which the monotone predicate `holds`, int32 `[R, 1]`; it must hold for the
    smallest key."""

    def key_of(place_R1):
        return jax.lax.bitcast_convert_type(place_R1 ^ _SIGN, jnp.int32)

    def narrow(i, place_R1):
        larger_R1 = place_R1 | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(key_of(larger_R1)), larger_R1, place_R1)

    return key_of(jax.lax.fori_loop(0, 32, narrow, jnp.zeros((rows, 1), jnp.uint32)))


def _keys(x: jax.Array) -> jax.Array:
    """Map float32 to int32 with the same order; -0 equals 0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x).astype(jnp.float32), jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _total(x: jax.Array) -> jax.Array:
    return x.sum(axis=-1, keepdims=True, dtype=jnp.int32 if x.dtype == jnp.bool_ else x.dtype)


def _blocks(x_RV: jax.Array, fill: int) -> jax.Array:
    """Reshape to `[R, 16, B]`: a block is a column, with ids B apart."""
    rows, vocabulary = x_RV.shape
    filled = jnp.pad(x_RV, ((0, 0), (0, -vocabulary % _BLOCK)), constant_values=fill)
    return filled.reshape(rows, _BLOCK, -1)


def _of_blocks(search: Callable[..., Any], wanted_RB: jax.Array, *arrays: tuple[jax.Array, int]) -> Any:
    """Run `search` on arrays `[R, V]`, each with its fill value, of which only the wanted blocks matter."""
    rows, count = wanted_RB.shape
    most = count // _FEW

    def of_all():
        return search(*(x_RV for x_RV, _ in arrays))

    def of_wanted():
        slots_RB = jnp.where(wanted_RB, jnp.cumsum(wanted_RB, axis=-1) - 1, most)
        blocks_RM = (
            jnp.full((rows, most), count).at[jnp.arange(rows)[:, None], slots_RB].set(jnp.arange(count), mode="drop")
        )

        def gathered(x_RV, fill):
            taken = jnp.take_along_axis(_blocks(x_RV, fill), blocks_RM[:, None], axis=2, mode="fill", fill_value=fill)
            return taken.reshape(rows, -1)

        return search(*(gathered(x_RV, fill) for x_RV, fill in arrays))

    if most < _WORTHWHILE:
        return of_all()
    return jax.lax.cond(jnp.all(_total(wanted_RB) <= most), of_wanted, of_all)
