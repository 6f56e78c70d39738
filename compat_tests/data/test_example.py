"""Examples from rows, what a loss needs of a batch of them, and outputs without padding examples."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from compat_tests.data.examples import COLUMNS, TEXTS, examples_of, row_of
from trl_jax.data.batch import Columns, Example, Extras, loss_batch, of_examples
from trl_jax.data.loader import fingerprint, row_digest

every_number_of_texts = pytest.mark.parametrize("texts", TEXTS)


@every_number_of_texts
@given(data=st.data())
def test_an_example_of_a_row(texts, data):
    wanted = data.draw(examples_of(texts))
    found = COLUMNS[texts].example(row_of(wanted) | {"another": "column"})
    assert found == wanted and COLUMNS[texts].all == tuple(row_of(wanted))
    assert (found.longest, found.tokens) == (max(map(len, wanted.texts)), sum(map(len, wanted.texts)))


def test_numbers_that_a_row_lacks_are_no_extras():
    columns = Columns(("ids",), ("margin", "label"))
    assert columns.example({"ids": [1]}) == Example(([1],))
    assert columns.example({"ids": [1], "label": 2.0}) == Example(([1],), Extras({"label": 2.0}))
    assert Columns(("ids",)).all == ("ids",)


@every_number_of_texts
def test_what_a_loss_needs_of_a_batch(texts):
    examples = [Example(([1],) * texts, Extras({"margin": i / 2, "label": -i})) for i in range(3)]
    batch = loss_batch(examples, 5)
    np.testing.assert_allclose(batch.weight, [1 / 3] * 3 + [0] * 2, rtol=1e-6)
    assert {name: values.tolist() for name, values in batch.extras.example.items()} == {
        "margin": [0, 0.5, 1, 0, 0], "label": [0, -1, -2, 0, 0]
    }  # fmt: skip
    assert {array.dtype for array in (batch.weight, *batch.extras.example.values())} == {np.dtype("float32")}
    assert (batch.num_examples, batch.micro_batch) == (3, None)
    assert loss_batch([Example(([1],))], 1).extras == Extras()


@pytest.mark.parametrize("shape", [(), (4,)])
@every_number_of_texts
def test_outputs_of_real_examples(texts, shape):
    """Text by text; of five slots each, the last two are padding."""
    outputs = np.arange(texts * 5 * int(np.prod(shape))).reshape(texts * 5, *shape)
    wanted = [outputs[5 * text + example] for text in range(texts) for example in range(3)]
    np.testing.assert_array_equal(of_examples(outputs, texts, 3), wanted)
    np.testing.assert_array_equal(of_examples(outputs, texts, 5), outputs)


ROW = {"text_0": [1, 2], "text_1": [3], "text_2": [4], "margin": 0.5, "label": 1.0}


@every_number_of_texts
def test_a_fingerprint_is_of_what_is_trained_on(texts):
    """Other columns, the table's cache and its chunks do not matter; order, texts and every number do."""
    columns = COLUMNS[texts]
    rows = [ROW, ROW | {"margin": 2.0}]

    def of(rows):
        return fingerprint(Dataset.from_list(rows), columns)

    same = of([row | {"other": "text"} for row in rows])
    assert same == of(rows) == fingerprint(Dataset.from_list([ROW, *rows]).select([1, 2]), columns)
    others = [rows[::-1], rows[:1], [{**rows[0], "text_0": [1, 9]}, rows[1]], [{**rows[0], "label": 2.0}, rows[1]]]
    others += [[{**row, f"text_{texts - 1}": [*ROW[f"text_{texts - 1}"], 5]} for row in rows]]
    others += [[{name: value for name, value in row.items() if name != "label"} for row in rows]]
    assert len({same, *map(of, others)}) == 1 + len(others)


@every_number_of_texts
def test_a_row_s_digest_is_of_all_rows_up_to_it(texts):
    columns = COLUMNS[texts]
    first = row_digest(ROW, columns, 0)
    assert row_digest(ROW | {"other": "text"}, columns, 0) == first
    moved = ROW | {"text_0": [1], f"text_{texts - 1}": [2, 3]}
    others = [ROW | {"margin": 1.0}, ROW | {"label": 0.0}, ROW | {"text_0": [1, 2, 3]}, moved]
    digests = [first, row_digest(ROW, columns, first), *(row_digest(row, columns, 0) for row in others)]
    assert len(set(digests)) == len(digests) and all(0 <= digest < 2**64 for digest in digests)
