"""Changes of the scores that depend on the tokens before, or name ids: transformers' logits processors.

Each is a pytree and a function of (history, float32 scores `[R, V]`); a removed id has -inf. Numbers are traced, so
that other values compile nothing; which processors there are is the pytree's structure.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.generation.history import History, Number


class Processor(Protocol):
    """A change of the scores `[R, V]` of the next token."""

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array: ...


def process(processors: Sequence[Processor], history: History, scores_RV: jax.Array) -> jax.Array:
    """The scores after each of the processors, in their order."""
    for processor in processors:
        scores_RV = processor(history, scores_RV)
    return scores_RV


def named(ids: jax.Array, vocabulary: int) -> jax.Array:
    """Where the ids stand in a vocabulary: bool `[V]`; ids outside of it are left out."""
    ids = jnp.where(ids < 0, vocabulary, ids)
    return jnp.zeros(vocabulary, jnp.bool_).at[ids].set(True, mode="drop")


def seen(ids_RT: jax.Array, counts_RT: jax.Array, vocabulary: int) -> jax.Array:
    """The ids of each row at places that count: bool `[R, V]`; ids outside of the vocabulary are left out."""
    ids_RT = jnp.where(counts_RT & (ids_RT >= 0), ids_RT, vocabulary)
    rows_R1 = jnp.arange(ids_RT.shape[0])[:, None]
    return jnp.zeros((ids_RT.shape[0], vocabulary), jnp.bool_).at[rows_R1, ids_RT].set(True, mode="drop")


class SequenceBias(NamedTuple):
    """Adds a bias to the last id of each sequence that the tokens before have begun; -inf for words that are banned.

    prefixes: int32 `[n, longest - 1]`, on the left filled with -2, the ids before the last.
    last: int32 `[n]`.
    bias: float32 `[n]`.
    """

    prefixes: jax.Array
    last: jax.Array
    bias: jax.Array

    @classmethod
    def of(cls, biases: dict[tuple[int, ...], float]) -> SequenceBias:
        """Of sequences of ids and what each gets."""
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
    """Divides positive scores of tokens that were there by `penalty` and multiplies negative ones (Keskar et al. 2019,
    arXiv:1909.05858). The prompt counts, its padding does not."""

    penalty: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        places = jnp.arange(history.ids.shape[1])
        counts_RT = (places >= history.pads[:, None]) & (places < history.lengths)
        return _penalised(history, counts_RT, self.penalty, scores_RV)


class PromptRepetitionPenalty(NamedTuple):
    """The same for tokens of the prompt alone, its padding among them: transformers' `encoder_repetition_penalty` has
    one divided by it as its `penalty`."""

    penalty: Number

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        places = jnp.arange(history.ids.shape[1])
        return _penalised(history, places < history.lengths - history.new, self.penalty, scores_RV)


def _penalised(history: History, counts_RT: jax.Array, penalty: Number, scores_RV: jax.Array) -> jax.Array:
    counts_RT = jnp.broadcast_to(counts_RT, history.ids.shape)
    penalised_RV = jnp.where(scores_RV < 0, scores_RV * penalty, scores_RV / penalty)
    return jnp.where(seen(history.ids, counts_RT, scores_RV.shape[-1]), penalised_RV, scores_RV)


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("size", "of_prompt"))
@dataclasses.dataclass(frozen=True)
class NoRepeatNGram:
    """Removes ids that would end a run of `size` tokens which the row, padding and all, has already, or its prompt has
    where `of_prompt`. Both are static."""

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
        return jnp.where(seen(ids_RT[:, before:], begun_RN, scores_RV.shape[-1]), -jnp.inf, scores_RV)


class MinLength(NamedTuple):
    """Removes the ids that end a text while prompt, padding and new tokens are fewer than `length`."""

    length: Number
    eos: jax.Array

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        removed_RV = (history.lengths < self.length) & named(self.eos, scores_RV.shape[-1])
        return jnp.where(removed_RV, -jnp.inf, scores_RV)


class MinNewTokens(NamedTuple):
    """Removes the ids that end a text while the new tokens are fewer than `count`."""

    count: Number
    eos: jax.Array

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        removed_RV = (history.new < self.count) & named(self.eos, scores_RV.shape[-1])
        return jnp.where(removed_RV, -jnp.inf, scores_RV)


class ForcedTokens(NamedTuple):
    """Leaves nothing but `ids` where a row has `length` tokens: the first token, or the last before max_length."""

    length: Number
    ids: jax.Array

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        forced_V = jnp.where(named(self.ids, scores_RV.shape[-1]), 0.0, -jnp.inf)
        return jnp.where(history.lengths == self.length, forced_V, scores_RV)


class RemoveInvalidValues(NamedTuple):
    """Makes 0 of NaN, and the largest and least numbers of float32 of the infinities."""

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        limits = jnp.finfo(jnp.float32)
        return jnp.nan_to_num(scores_RV, nan=0.0, posinf=limits.max, neginf=limits.min)


class ExponentialDecay(NamedTuple):
    """Adds |score| * (factor^n - 1) to the ids that end a text, n new tokens behind the first `start`."""

    start: Number
    log_factor: Number
    eos: jax.Array

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        behind = history.new - self.start
        growth = jnp.expm1(behind * self.log_factor)
        raised_RV = (behind > 0) & named(self.eos, scores_RV.shape[-1]) & jnp.isfinite(scores_RV)
        return scores_RV + jnp.where(raised_RV, jnp.abs(scores_RV) * growth, 0.0)


class SuppressTokens(NamedTuple):
    """Removes ids."""

    ids: jax.Array

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        return jnp.where(named(self.ids, scores_RV.shape[-1]), -jnp.inf, scores_RV)


class SuppressTokensAtBegin(NamedTuple):
    """Removes ids as the first new token: as the second behind a prompt of one token, where `after_bos`."""

    ids: jax.Array
    after_bos: jax.Array | bool

    def __call__(self, history: History, scores_RV: jax.Array) -> jax.Array:
        begin = jnp.where((history.lengths - history.new <= 1) & self.after_bos, 1, 0)
        removed_RV = (history.new == begin) & named(self.ids, scores_RV.shape[-1])
        return jnp.where(removed_RV, -jnp.inf, scores_RV)
