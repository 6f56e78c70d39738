"""What a run is made of stays as it is once the trainer is there, but for what a script may set."""

from __future__ import annotations

import dataclasses

import pytest

from compat_tests.trainer.trainers import FACTS, make, table
from trl_jax.training.state import SETTABLE, RunState


@pytest.fixture(scope="module")
def run(checkpoint, tmp_path_factory):
    import trl_jax

    return make(trl_jax, checkpoint(**FACTS), tmp_path_factory.mktemp("out")).parts.run


@pytest.mark.parametrize("name", sorted({field.name for field in dataclasses.fields(RunState)} - SETTABLE))
def test_a_run_that_is_assembled_is_not_set_up_again(run, name):
    with pytest.raises(AttributeError, match=f"^The run is assembled, and {name} of it is set no more"):
        setattr(run, name, None)


def test_what_a_script_may_set_is_what_the_trainer_shows(run):
    assert {field.name for field in dataclasses.fields(RunState)} >= SETTABLE
    rows = table(3)
    kept, run.train_dataset = run.train_dataset, rows
    assert run.train_dataset is rows
    run.train_dataset = kept
