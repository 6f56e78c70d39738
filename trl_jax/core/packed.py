"""Packed rows: texts laid end to end in one row, and the tokens that each of its tokens attends to."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

BLOCK = 64  # a packed row's length is a multiple of it; 64 is faster on a CPU than 128 and 256


class RowView(NamedTuple):
    """Indices that turn the X texts of each packed row into rows of L tokens, and back; int32, of NumPy or JAX.

    places: `[R, X, L]`, the place in its packed row of each token of a text, in order; T after the text's end. rows:
    `[R, S, T]`, the place among the X * L tokens of these rows of each token of the packed row: in its text, or in
        each of the up to S texts that share it; X * L where there is none.
    """

    places: Any
    rows: Any


class Packed(NamedTuple):
    """The range of tokens that each token of a packed row attends to; int32 arrays `[R, T]`, of NumPy or JAX.

    A token attends to the range of its row from `first` up to, but not including, `end`. So that one range is enough
    for both answers to a shared prompt, one answer lies before the prompt in reverse order, the other after it. Padding
    attends to nothing: both are the row's length.

    Any number of branches may share a context, which lies once, before them: a token of a branch attends to a second
    range, its context, from `context` up to, but not including, `context_end`, beside its own range in the branch.
    Branches do not see each other. What has no context has an empty one.

    longest: length of the longest text that TRL would have run in one batch with the token's. prompt: where the prompt
        begins that a token belongs to or follows; None where no two answers share one, and each range is in
        the order of its text.
    texts: indices for kernels that read rows, else None.
    context, context_end: None where no branches share one.
    """

    first: Any
    end: Any
    longest: Any
    prompt: Any = None
    texts: RowView | None = None
    context: Any = None
    context_end: Any = None


def reads_of_rows(places: Any, length: int) -> Any:
    """Flat places int32 `[R]`, row * T + place, of one token in each row of `length` tokens; of NumPy or JAX."""
    return places + np.arange(len(places), dtype=np.int32) * length
