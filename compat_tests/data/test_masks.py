"""Rows padded by the user: padding is removed according to their masks, with the same result as unpadded rows."""

from __future__ import annotations

import re

import pytest
from datasets import ClassLabel, Dataset, Features, IterableDataset, List, Value

from compat_tests.tiny import preference_rows, tiny_tokenizer
from trl_jax.data import reward
from trl_jax.data.reward import prepare

MASKED = ("attention_mask_chosen", "attention_mask_rejected")


def table(rows):
    return Dataset.from_list(rows)


def stream(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


both = pytest.mark.parametrize("form", [table, stream])


def ready(dataset, **asked):
    return prepare(dataset, tiny_tokenizer(), **{"max_length": None, "num_proc": None, "name": "train"} | asked)


def tokenized(side="right", **padding):
    """Rows as scripts of 2023 prepared them, and the number of real tokens of each."""
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = side
    rows = []
    for row in preference_rows(12):
        made = {"margin": 0.5}
        for part in ("chosen", "rejected"):
            found = tokenizer(row[part], truncation=True, **padding)
            made |= {f"input_ids_{part}": found["input_ids"], f"attention_mask_{part}": found["attention_mask"]}
        rows.append(made)
    return rows


@both
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_padded_rows_are_what_unpadded_ones_are(form, side, caplog):
    plain = list(ready(form(tokenized())))
    assert plain == [
        {"chosen_ids": row["input_ids_chosen"], "rejected_ids": row["input_ids_rejected"], "margin": 0.5}
        for row in tokenized()
    ]
    assert caplog.messages == []
    padded = ready(form(tokenized(side, padding="max_length", max_length=96)), max_length=90)
    assert list(padded) == plain and all(row.keys() == {*reward.IDS, "margin"} for row in plain)
    told = [message for message in caplog.messages if "padding" in message]
    assert len(told) == 1
    assert list(ready(padded)) == plain and len(caplog.messages) == 1, "preparing twice is preparing once"


@both
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_padding_on_both_sides_of_one_answer(form):
    row = {"input_ids_chosen": [1, 1, 5, 6, 1], "attention_mask_chosen": [0, 0, 1, 1, 0], "input_ids_rejected": [7]}
    assert list(ready(form([row]))) == [{"chosen_ids": [5, 6], "rejected_ids": [7]}]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_other_columns_keep_their_types_and_lists_of_one_length_shrink():
    kinds = {column: List(Value("int32"), length=3) for column in ("input_ids_chosen", "input_ids_rejected")}
    kinds |= {column: List(Value("bool"), length=3) for column in MASKED}
    kinds["source"] = ClassLabel(names=["web", "book"])
    row = {"input_ids_chosen": [5, 6, 1], "input_ids_rejected": [7, 1, 1], "source": 1}
    row |= {MASKED[0]: [True, True, False], MASKED[1]: [True, False, False]}
    rows = Dataset.from_list([row] * 2500, features=Features(kinds)).select(range(100, 2400))
    prepared = ready(rows)
    assert prepared.to_list() == [{"chosen_ids": [5, 6], "rejected_ids": [7], "source": 1}] * 2300
    assert prepared.features["source"].names == ["web", "book"] and prepared.format["type"] is None


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_warning_counts_rows_and_names_the_columns(caplog):
    row = {"input_ids_chosen": [5, 6], "attention_mask_chosen": [1, 1]}
    row |= {"input_ids_rejected": [7, 1], "attention_mask_rejected": [1, 1]}
    rows = [row, row, row | {"attention_mask_rejected": [1, 0]}]
    ready(table(rows))
    list(ready(stream(rows * 3)))
    assert caplog.messages == [
        "1 of 3 rows of train_dataset have padding according to ['attention_mask_chosen', "
        "'attention_mask_rejected']: removed (first: row 2)",
        "Row 2 of train_dataset has padding according to 'attention_mask_rejected': removed; further rows like it are "
        "not reported.",
    ]


BAD = {
    "short": ([1], "must have 2 values, one for each token of 'chosen_ids', got 1."),
    "none": (None, "must be a list of 0 and 1, one for each token of 'chosen_ids', got None"),
    "two": ([1, 2], "must be a list of 0 and 1, one for each token of 'chosen_ids', got 2 (int)"),
    "half": ([1.0, 0.5], "must be a list of 0 and 1, one for each token of 'chosen_ids', got 0.5 (float)"),
    "words": (["1", "0"], "must be a list of 0 and 1, one for each token of 'chosen_ids', got '1' (str)"),
    "a_hole": ([1, None], "must be a list of 0 and 1, one for each token of 'chosen_ids', got None"),
    "zeros": ([0, 0], "must be ones for the text"),
    "a_number": (1, "must be a list of 0 and 1, one for each token of 'chosen_ids', got 1 (int)"),
}  # fmt: skip


@both
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_mask_that_is_none(form, kind):
    mask, text = BAD[kind]
    good = {"input_ids_chosen": [5, 6], "attention_mask_chosen": [1, 1], "input_ids_rejected": [7]}
    rows = [good, good | {"attention_mask_chosen": mask}]
    if kind in ("half", "words", "a_number"):  # a table's column has a single type
        rows = rows[1:]
    where = f"Row {len(rows) - 1} of train_dataset, column 'attention_mask_chosen': "
    with pytest.raises(ValueError, match=re.escape(where + text)):
        list(ready(form(rows)))


@both
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_zeros_between_ones(form):
    good = {"input_ids_chosen": [5, 6, 7], "attention_mask_chosen": [0, 1, 1], "input_ids_rejected": [7]}
    text = "Row 2 of train_dataset, column 'attention_mask_chosen': must be ones for the text"
    with pytest.raises(ValueError, match=re.escape(text)):
        list(ready(form([good, good, good | {"attention_mask_chosen": [1, 0, 1]}])))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_stream_whose_row_lacks_its_mask():
    good = {"input_ids_chosen": [5], "attention_mask_chosen": [1], "input_ids_rejected": [7]}
    rows = [good, {"input_ids_chosen": [5], "input_ids_rejected": [7]}]
    text = "Row 1 of train_dataset lacks the columns ['attention_mask_chosen']"
    with pytest.raises(ValueError, match=re.escape(text)):
        list(ready(stream(rows)))


IDS = {"chosen_ids": [5, 6], "rejected_ids": [7]}
TEXTS = {"chosen": "a", "rejected": "b"}
UNREAD = {
    "masks": (IDS | dict.fromkeys(MASKED, [1]), f"{list(MASKED)} are ignored: every token of 'chosen_ids' and"),
    "dpo_masks": (IDS | {"chosen_attention_mask": [1, 0]}, "['chosen_attention_mask'] are ignored: every token of"),
    "weights": (TEXTS | {"weight": 2.0}, "['weight'] are ignored: all pairs have the same weight."),
    "labels": (IDS | {"labels": 1}, "['labels'] are ignored: the chosen answer counts as the better one in every"),
    "early": (TEXTS | dict.fromkeys(("input_ids_chosen", "input_ids_rejected"), [5]),
              "['input_ids_chosen', 'input_ids_rejected'] are ignored: the text is used instead, as in TRL."),
    "margins": (TEXTS | {"margins": 1.0}, "['margins'] are ignored: the column must be named 'margin'."),
    "question": (TEXTS | {"question": "?"}, "['question'] are ignored: the prompt column must be named 'prompt'."),
}  # fmt: skip


@both
@pytest.mark.parametrize("kind", UNREAD)
def test_columns_a_script_may_believe_are_read(form, kind, caplog):
    row, text = UNREAD[kind]
    list(ready(form([row, row])))
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(f"train_dataset: the columns {text}")


@both
def test_columns_that_mean_nothing_to_a_pair_are_left_alone(form, caplog):
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "question": "p", "score_chosen": 5.0, "source": "web"}
    list(ready(form([row])))
    list(ready(form([IDS | {"margin": 1.0, "margins": 2.0, "question": "p"}])))
    assert caplog.messages == []
