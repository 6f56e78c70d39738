"""Batches of texts beside those of TRL's collator."""

from __future__ import annotations

import numpy as np
import pytest

from trl_jax.hub.torch import bridge
from trl_jax.trainer.collator import (
    DataCollatorForCompletionOnlyLM,
    DataCollatorForLanguageModeling,
    DataCollatorForPreference,
)

TEXTS = [{"input_ids": [1, 2, 3, 4, 5]}, {"input_ids": [6, 7]}]
LABELLED = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [6, 7], "labels": [6, -100]}]
PACKED = [TEXTS[0] | {"seq_lengths": [3, 2]}, TEXTS[1] | {"seq_lengths": [1, 1]}]


@pytest.mark.parametrize("multiple", [None, 4])
@pytest.mark.parametrize("form", [{}, {"padding_free": True}, {"return_position_ids": True}])
@pytest.mark.parametrize("rows", [TEXTS, LABELLED, PACKED])
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


def test_places_of_packed_documents_are_trls():
    torch, trl = pytest.importorskip("torch"), pytest.importorskip("trl.trainer.sft_trainer")
    lengths = [[3, 2], [1], [2, 1, 4]]
    wanted = trl.DataCollatorForLanguageModeling.get_position_ids_from_packed_seq_lengths(lengths)
    found = DataCollatorForLanguageModeling.get_position_ids_from_packed_seq_lengths(lengths)
    assert len(found) == 3 and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("collator, row", [
    (DataCollatorForLanguageModeling, TEXTS[0]), (DataCollatorForPreference, {"chosen_ids": [1], "rejected_ids": [2]}),
])  # fmt: skip
def test_without_torch_batches_are_arrays(monkeypatch, collator, row):
    monkeypatch.setattr(bridge, "available", lambda: False)
    assert {type(values) for values in collator(0)([row]).values()} == {np.ndarray}


def test_the_collator_that_trl_had():
    with pytest.raises(TypeError, match=r"gone from TRL.*SFTConfig\(completion_only_loss=True\) and rows of 'prompt'"):
        DataCollatorForCompletionOnlyLM("### Answer:", tokenizer=None)
