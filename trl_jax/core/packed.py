"""A stream: texts laid end to end in one row, and what each token of it may see."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

BLOCK = 64  # a stream's length is a multiple of it; of 64, 128 and 256 the quickest on a CPU


class RowView(NamedTuple):
    """A stream's texts as rows of L tokens; int32 arrays, of NumPy or JAX.

    places: `[R, N, L]`, where in its stream each token of a text stands, in order; T behind the text.
    rows: `[R, 2, T]`, where in these rows, laid end to end, each token of the stream stands: in its text, or in both of
    those that begin with it; N x L where there is none.
    """

    places: Any
    rows: Any


class Packed(NamedTuple):
    """What the tokens of a stream see of it; int32 arrays `[R, T]`, of NumPy or JAX.

    A token sees one run of its row, from `first` up to but without `end`. So that this holds for both answers to a
    prompt, one stands before it from its last token to its first, the other behind it. A token that only fills the
    stream sees nothing: both are the stream's length.

    `longest` is the length of the longest text among those that TRL would have run beside the token's own. `prompt` is
    where the prompt begins that a token belongs to or follows; None where nothing is shared, and a run is in the order
    of its text. `texts` are there for kernels that read rows, else None.
    """

    first: Any
    end: Any
    longest: Any
    prompt: Any = None
    texts: RowView | None = None


def reads_of_rows(places: Any, length: int) -> Any:
    """Flat places int32 `[R]`, row * T + place, of one token in each row of `length` tokens; of NumPy or JAX."""
    return places + np.arange(len(places), dtype=np.int32) * length
