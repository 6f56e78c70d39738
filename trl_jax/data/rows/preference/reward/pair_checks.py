"""Checks of preference pairs before they are trained on; they read blocks, as those of `data.rows.checks`."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trl_jax.core.printable import brief
from trl_jax.data.rows.checks import argument, check_numbers, id_lists, numbers_of

IDS = ("chosen_ids", "rejected_ids")
TEXTS = ("chosen", "rejected")
LEGACY_IDS = (("chosen_input_ids", "rejected_input_ids"), ("input_ids_chosen", "input_ids_rejected"))


def missing_columns(columns: list[str], name: str) -> ValueError:
    """The error of a dataset that has only `columns`, neither texts nor ids."""
    accepted = ", or ".join(f"{chosen!r} and {rejected!r}" for chosen, rejected in (TEXTS, IDS, *LEGACY_IDS))
    return ValueError(f"{argument(name)} needs the columns {accepted}; found {brief(columns, 500)}.")


def check_ids(block: pa.Table, first: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    """The number of tokens of the longer answer and whether both answers are equal, each `[rows]`.

    Raises:
        ValueError: a value is not a list of at least one int.
    """
    chosen, rejected = (id_lists(block, column, first, where) for column in IDS)
    of_chosen, of_rejected = (numbers_of(pc.list_value_length(side)) for side in (chosen, rejected))
    identical = of_chosen == of_rejected
    rows = np.flatnonzero(identical)
    if rows.size:
        values = [numbers_of(side.take(pa.array(rows)).flatten()) for side in (chosen, rejected)]
        starts = np.cumsum(of_chosen[rows]) - of_chosen[rows]
        identical[rows] = np.logical_and.reduceat(values[0] == values[1], starts)
    return np.maximum(of_chosen, of_rejected), identical


def check_margin(block: pa.Table, first: int, where: str) -> None:
    """Raise ValueError for a row without a finite margin."""
    check_numbers(block, "margin", first, where, "a finite number: give every row a margin, or drop the column")


def empty_texts(block: pa.Table) -> np.ndarray:
    """Whether the chosen or rejected text of each row is the empty string, `[rows]`; conversations never are."""
    empty = np.zeros(block.num_rows, dtype=bool)
    for column in TEXTS:
        texts = block.column(column)
        if pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type):
            empty |= numbers_of(pc.equal(texts, "").fill_null(False))
    return empty
