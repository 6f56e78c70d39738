"""Reads `sequence_bias` and `bad_words_ids`, with transformers' checks and words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from trl_jax.generation.processors import SequenceBias


def sequence_biases(biases: Any, vocabulary: int) -> SequenceBias:
    """Of `{(10, 45): -2.0, (64,): -7.5}`, or `[[[10, 45], -2.0], [[64], -7.5]]`.

    Raises:
        ValueError: another form, or an id outside the vocabulary.
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
    """Biases of -inf; ids that end a text are not banned. None where no others are.

    Raises:
        ValueError: no list of lists of ids.
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
