"""Batches of texts against TRL's collator."""

from __future__ import annotations

import numpy as np
import pytest

from trl_jax.hub import torch_bridge
from trl_jax.trainer.collators import (
    DataCollatorForLanguageModeling,
    DataCollatorForUnpairedPreference,
    RewardDataCollator,
)
from trl_jax.trainer.collators import DataCollatorForPreference as OfPrompts

TEXTS = [{"input_ids": [1, 2, 3, 4, 5]}, {"input_ids": [6, 7]}]
LABELED = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [6, 7], "labels": [6, -100]}]
PAIRS = [
    {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]},
    {"prompt_ids": [7, 8], "chosen_ids": [9, 10], "rejected_ids": [11, 12, 13]},
]
RATED = [
    {"prompt_ids": [1, 2, 3], "completion_ids": [4, 5], "KL_completion_ids": [9, 10, 11, 12], "label": True},
    {"prompt_ids": [7, 8], "completion_ids": [9, 10, 11, 12], "KL_completion_ids": [4, 5], "label": False},
]
PACKED = [TEXTS[0] | {"seq_lengths": [3, 2]}, TEXTS[1] | {"seq_lengths": [1, 1]}]


@pytest.mark.parametrize("multiple", [None, 4])
@pytest.mark.parametrize("form", [{}, {"padding_free": True}, {"return_position_ids": True}])
@pytest.mark.parametrize("rows", [TEXTS, LABELED, PACKED])
def test_the_collator_of_texts_is_trls(rows, form, multiple):
    torch, trl = pytest.importorskip("torch"), pytest.importorskip("trl.trainer.sft_trainer")
    wanted = trl.DataCollatorForLanguageModeling(0, pad_to_multiple_of=multiple, **form)(rows)
    found = DataCollatorForLanguageModeling(0, pad_to_multiple_of=multiple, return_tensors="np", **form)(rows)
    tensors = DataCollatorForLanguageModeling(0, pad_to_multiple_of=multiple, **form)(rows)
    assert list(found) == list(tensors) == list(wanted)
    for name, values in wanted.items():
        if isinstance(values, int):
            assert found[name] == tensors[name] == values
            continue
        assert found[name].dtype == values.numpy().dtype and torch.equal(tensors[name], values)
        np.testing.assert_array_equal(found[name], values)


def same(found, wanted):
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        assert found[name].dtype == values.numpy().dtype, name
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize("multiple", [None, 4])
@pytest.mark.parametrize("cut", [{}, {"max_length": 4}, {"max_length": 4, "truncation_mode": "keep_end"}])
@pytest.mark.parametrize("known", [{}, {"ref_chosen_logps": -1.5, "ref_rejected_logps": -2.5}])
def test_the_collator_of_prompts_with_two_answers_is_trls(known, cut, multiple):
    trl = pytest.importorskip("trl.trainer.dpo_trainer")
    rows, how = [row | known for row in PAIRS], {"pad_to_multiple_of": multiple} | cut
    same(OfPrompts(0, return_tensors="np", **how)(rows), trl.DataCollatorForPreference(0, **how)(rows))


@pytest.mark.parametrize("multiple", [None, 4])
@pytest.mark.parametrize("max_length", [None, 4])
@pytest.mark.parametrize("known", [{}, {"ref_logps": -1.5, "ref_KL_logps": -2.5}])
@pytest.mark.parametrize("estimates", [False, True])
def test_the_collator_of_rated_completions_is_trls(estimates, known, max_length, multiple):
    trl = pytest.importorskip("trl.trainer.kto_trainer")
    rows = [row | known for row in RATED]
    if not estimates:
        rows = [{name: value for name, value in row.items() if name != "KL_completion_ids"} for row in rows]
    how = {"pad_to_multiple_of": multiple, "max_length": max_length}
    ours = DataCollatorForUnpairedPreference(0, return_tensors="np", **how)(rows)
    same(ours, trl.DataCollatorForUnpairedPreference(0, **how)(rows))


def test_a_truncation_that_there_is_not():
    with pytest.raises(ValueError, match="Unsupported truncation mode: middle, expected"):
        OfPrompts(0, truncation_mode="middle")


def test_places_of_packed_documents_are_trls():
    torch, trl = pytest.importorskip("torch"), pytest.importorskip("trl.trainer.sft_trainer")
    lengths = [[3, 2], [1], [2, 1, 4]]
    wanted = trl.DataCollatorForLanguageModeling.get_position_ids_from_packed_seq_lengths(lengths)
    found = DataCollatorForLanguageModeling.get_position_ids_from_packed_seq_lengths(lengths)
    assert len(found) == 3 and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("collator, row", [
    (DataCollatorForLanguageModeling, TEXTS[0]), (RewardDataCollator, {"chosen_ids": [1], "rejected_ids": [2]}),
    (OfPrompts, PAIRS[0]), (DataCollatorForUnpairedPreference, RATED[0]),
])  # fmt: skip
def test_without_torch_batches_are_arrays(monkeypatch, collator, row):
    monkeypatch.setattr(torch_bridge, "available", lambda: False)
    assert {type(values) for values in collator(0)([row]).values()} == {np.ndarray}
