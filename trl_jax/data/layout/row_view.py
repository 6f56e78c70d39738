"""The texts of packed rows as rows, too, for kernels that read rows. Pure NumPy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from trl_jax.core.packed import RowView
from trl_jax.data.layout.placing import Placed


class RowViewShape(NamedTuple):
    """How texts in packed rows are viewed as rows, too: of at most `examples` examples. `shape` goes from the tokens of
    the longest packed row, and of the longest text, to the lengths of packed rows and of rows."""

    examples: int
    shape: Callable[[int, int], tuple[int, int]]


def view_rows(placed: Sequence[Placed], into: Sequence[int], view: RowViewShape) -> int:
    """Rows that the texts of any packed row are viewed as; of documents the next power of two, so that few shapes
    compile."""
    documents = int(np.bincount(into, [len(one.example.documents) for one in placed]).max())
    return 1 << (documents - 1).bit_length() if documents else len(placed[0].example.texts) * view.examples


def no_view(rows: int, count: int, longest: int, length: int, sharing: int) -> RowView:
    places = np.full((rows, 1, count, longest), length, np.int32)
    return RowView(places, np.full((rows, 1, sharing, length), count * longest, np.int32))


def sharing(placed: Sequence[Placed], into: Sequence[int]) -> int:
    """How many texts of a packed row may share a token: 2, or the next power of two, so that few shapes compile."""
    branches = Counter((row, one.context) for one, row in zip(placed, into, strict=True) if one.context is not None)
    return max(2, 1 << (max(branches.values(), default=1) - 1).bit_length())


def write_view(view: RowView, row: int, number: int, at: np.ndarray, shared: int, side: int) -> None:
    """Enter a text as a row of this number.

    Args:
        row: the packed row.
        at: where the text's tokens are in it.
        shared: how many of the first ones are in rows of `side` texts before it, too.
    """
    at_view, back = view.places[row, 0], view.rows[row, 0]
    own = number * at_view.shape[1] + np.arange(len(at))
    at_view.reshape(-1)[own] = at
    back[0, at[shared:]] = own[shared:]
    back[side if shared else 0, at[:shared]] = own[:shared]
