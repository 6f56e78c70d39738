"""Packed rows: texts laid end to end in one row, and what each token of it sees."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

BLOCK = 64  # a packed row's length is a multiple of it; of 64, 128 and 256 the quickest on a CPU


class RowView(NamedTuple):
    """The texts of packed rows as rows of L tokens, X of them; int32 arrays, of NumPy or JAX.

    places: `[R, X, L]`, the place in its packed row of each token of a text, in order; T behind the text.
    rows: `[R, 2, T]`, the place in these rows, laid end to end, of each token of the packed row: in its text, or in
        both of those that begin with it; X x L where there is none.
    """

    places: Any
    rows: Any


class Packed(NamedTuple):
    """What the tokens of packed rows see; int32 arrays `[R, T]`, of NumPy or JAX.

    A token sees one range of its row, from `first` up to but without `end`. So that this holds for both answers to a
    prompt, one stands before it from its last token to its first, the other behind it. A token that only fills the row
    sees nothing: both are the row's length.

    `longest` is the length of the longest text that TRL would have run in one batch with the token's. `prompt` is the
    place where the prompt begins that a token belongs to or follows; None where nothing is shared, and a range is in
    the order of its text. `texts` are there for kernels that read rows, else None.
    """

    first: Any
    end: Any
    longest: Any
    prompt: Any = None
    texts: RowView | None = None


def reads_of_rows(places: Any, length: int) -> Any:
    """Flat places int32 `[R]`, row * T + place, of one token in each row of `length` tokens; of NumPy or JAX."""
    return places + np.arange(len(places), dtype=np.int32) * length
