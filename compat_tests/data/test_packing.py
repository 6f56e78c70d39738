"""Packing against TRL."""

from __future__ import annotations

import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st

from compat_tests.effort import drawn
from trl_jax.data.packing import pack_dataset

STRATEGIES = ("bfd", "bfd_split", "wrapped")
LENGTHS = st.lists(st.integers(0, 13), min_size=1, max_size=40).filter(any)


def rows(lengths):
    ids = [[100 * row + place for place in range(length)] for row, length in enumerate(lengths)]
    return Dataset.from_dict({"input_ids": ids, "seen": [[str(i) for i in row] for row in ids]})


@pytest.fixture(scope="module")
def theirs():
    return pytest.importorskip("trl.data_utils")


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(deadline=None, max_examples=drawn(60))
@given(lengths=LENGTHS, size=st.integers(1, 9))
def test_rows_are_packed_as_trl_packs_them(theirs, strategy, lengths, size):
    """Calls the function that `map` would call, because `map` writes a file each time."""
    from trl_jax.data import packing

    table = rows(lengths).with_format("arrow")[:]
    if strategy == "wrapped":
        found, wanted = packing._wrapped(table, size), theirs._pack_wrapped(table, size)
    else:
        found = packing._best_fit(table, size, strategy == "bfd_split")
        wanted = theirs._pack_bfd(table, size, "split" if strategy == "bfd_split" else "truncate")
    assert found.equals(wanted)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["table", "sliced", "dict", "stream", "formatted", "batches"])
def test_datasets_are_packed_as_trl_packs_them(theirs, strategy, kind):
    table, how = rows([3, 0, 7, 2, 5, 5, 1, 12, 4]), {}
    given = {
        "table": table,
        "sliced": table.select(range(2, 8)),
        "dict": DatasetDict(train=table),
        "stream": table.to_iterable_dataset(),
        "formatted": table.with_format("numpy", columns=["input_ids"], output_all_columns=True),
        "batches": table,
    }[kind]
    if kind == "batches":
        how = {"map_kwargs": {"batch_size": 4}}
    found, wanted = (pack(given, 5, strategy, **how) for pack in (pack_dataset, theirs.pack_dataset))
    if kind == "dict":
        found, wanted = found["train"], wanted["train"]
    if kind == "formatted":
        assert found.format == wanted.format
        found, wanted = found.with_format(None), wanted.with_format(None)
    assert list(found) == list(wanted) and found.features == wanted.features


def test_what_cannot_be_packed():
    with pytest.raises(ValueError, match="strategy must be one of bfd, bfd_split, wrapped, got 'best'."):
        pack_dataset(rows([1]), 4, "best")
    with pytest.raises(ValueError, match="seq_length must be at least 1, got 0."):
        pack_dataset(rows([1]), 0)
    with pytest.raises(TypeError, match="every column to hold lists, but 'text' is string. Remove it with"):
        pack_dataset(Dataset.from_dict({"ids": [[1]], "text": ["a"]}), 4)
    with pytest.raises(ValueError, match="lists of equal length within a row: 'a' and 'b' differ."):
        pack_dataset(Dataset.from_dict({"a": [[1, 2]], "b": [[1]]}), 4)


def test_rows_of_nothing_pack_to_nothing():
    assert list(pack_dataset(rows([0, 0]), 4)) == []
