"""A trainer's parts are complete when it is constructed and then immutable, except for what a user may set."""

from __future__ import annotations

import copy
import dataclasses

import pytest

import trl_jax
from compat_tests.trainer.trainers import FACTS, make, table
from trl_jax.training.state import Editable, Setup


@pytest.fixture(scope="module")
def trainer(checkpoint, tmp_path_factory):
    return make(trl_jax, checkpoint(**FACTS), tmp_path_factory.mktemp("out"))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Setup)])
def test_no_field_of_a_setup_is_set_again(trainer, name):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(trainer.parts.setup, name, None)


def test_what_a_script_may_set_is_not_missing(trainer):
    editable = trainer.parts.setup.editable
    missing = {name for name, value in vars(editable).items() if value is None}
    assert missing <= {"eval_dataset", "pad_to_multiple_of"}


@pytest.mark.parametrize("name", ["args", "model", "processing_class", "train_dataset", "eval_dataset"])
def test_the_parts_see_what_a_script_sets(trainer, name):
    """Each part reads it from the setup."""
    assert name in {field.name for field in dataclasses.fields(Editable)} | {"processing_class"}
    before = getattr(trainer, name)
    other = table(3) if name.endswith("dataset") else copy.copy(before) if name == "model" else object()
    try:
        setattr(trainer, name, other)
        assert getattr(trainer.parts.setup, name) is other is getattr(trainer, name)
    finally:
        setattr(trainer, name, before)
