"""Datasets that TRL's trainers refuse, refused in TRL's words by each of ours."""

from __future__ import annotations

import pytest
from datasets import Dataset, IterableDataset

import trl_jax
from compat_tests.mesh.rank import rows_of
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.reference import BASE
from compat_tests.trainer.trainers import FACTS

KINDS = ("Reward", "SFT", "DPO", "KTO")


@pytest.fixture
def make(checkpoint, tmp_path):
    def made(package, kind, rows, **arguments):
        args = getattr(package, f"{kind}Config")(str(tmp_path), max_steps=1, **BASE)
        model = str(checkpoint(**FACTS if kind == "Reward" else SMALL))
        return getattr(package, f"{kind}Trainer")(model, args=args, train_dataset=rows, **arguments)

    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("column", ["image", "images"])
def test_rows_with_images(kind, column, make):
    plain = rows_of(kind, 4)
    rows, words = [row | {column: "cat.png"} for row in plain], r"The dataset appears to be vision-related \(contains "
    with pytest.raises(ValueError, match=words + f".*train_dataset has '{column}'.*remove_columns"):
        make(trl_jax, kind, Dataset.from_list(rows))
    with pytest.raises(ValueError, match=words):
        make(trl_jax, kind, IterableDataset.from_generator(lambda: iter(rows)))
    with pytest.raises(ValueError, match=words + f".*eval_dataset has '{column}'"):
        make(trl_jax, kind, Dataset.from_list(plain), eval_dataset=Dataset.from_list(rows))
    if kind != "Reward" and column == "image":
        trl = pytest.importorskip("trl")
        with pytest.raises(ValueError, match=words):
            make(trl, kind, Dataset.from_list(rows))


IDS_TOO = {
    "Reward": ("input_ids_chosen", "input_ids_rejected"),
    "DPO": ("chosen_input_ids", "rejected_input_ids", "chosen_labels", "rejected_labels"),
    "KTO": ("completion_input_ids", "completion_labels", "KL_completion_input_ids", "KL_completion_labels"),
}
READ = {"Reward": ("chosen_ids",), "DPO": ("prompt_ids", "chosen_ids"), "KTO": ("prompt_ids", "completion_ids")}


@pytest.mark.parametrize("kind", IDS_TOO)
def test_of_texts_and_ids_in_the_columns_of_early_releases_the_texts_are_read(kind, make):
    trl = pytest.importorskip("trl")
    rows = [row | dict.fromkeys(IDS_TOO[kind], [5, 6, 7]) for row in rows_of(kind, 4)]
    for row in rows:
        row.pop("margin", None)
    ours, theirs = (make(package, kind, Dataset.from_list(rows)).train_dataset for package in (trl_jax, trl))
    for column in READ[kind]:
        assert ours[column] == theirs[column]


def told(caplog, words):
    return [one for one in caplog.messages if words in one]


NOTHING = {
    "SFT": ({"max_length": 1}, lambda row: {"text": "bread soup"}),
    "DPO": ({}, lambda row: {"prompt_ids": [5], "chosen_ids": [], "rejected_ids": []}),
    "KTO": ({}, lambda row: {"prompt_ids": [5, 6], "completion_ids": [], "label": True}),
}  # fmt: skip


@pytest.mark.parametrize("kind", NOTHING)
def test_rows_in_which_nothing_is_predicted(kind, checkpoint, tmp_path, caplog):
    options, changed = NOTHING[kind]
    rows = Dataset.from_list([changed(row) for row in rows_of(kind, 4)])
    args = getattr(trl_jax, f"{kind}Config")(str(tmp_path), **(BASE | {"max_steps": 1} | options))
    trainer = getattr(trl_jax, f"{kind}Trainer")(str(checkpoint(**SMALL)), args=args, train_dataset=rows)
    [one] = told(caplog, "losses are 0.0 throughout")
    assert "train_dataset" in one and "in all 4 rows" in one
    assert trainer.args.max_steps == 1


def test_rows_without_a_prompt_and_with_equal_answers_are_counted_once(make, caplog):
    pairs = {"prompt": ["", "bread:", "bread:"], "chosen": ["yes", "soup", "yes"], "rejected": ["no", "soup", "no"]}
    make(trl_jax, "DPO", Dataset.from_dict(pairs))
    assert told(caplog, "prompt: the first") == [
        "1 of 3 rows of train_dataset (first: row 0) have no prompt: the first token of their answers has no context, "
        "and is not scored."
    ]
    assert told(caplog, "equal chosen") == [
        "1 of 3 rows of train_dataset (first: row 1) have equal chosen and rejected answers: no preference."
    ]
    caplog.clear()
    answers = {"prompt": ["", "bread:"], "completion": ["yes", "no"], "label": [True, False]}
    make(trl_jax, "KTO", Dataset.from_dict(answers))
    assert len(told(caplog, "1 of 2 rows of train_dataset (first: row 0) have no prompt")) == 1
