"""Recordings of TRL's runs: rejected if their source changed, small, and close to the run they were made from."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from compat_tests.parity import golden
from compat_tests.parity.cases import CASES
from compat_tests.parity.marks import assert_same_weights
from compat_tests.parity.sketch import Sketch, gap, sketch, unpacked
from compat_tests.tiny import preference_rows


def recorded(folder, rows=None, model=None, **config):
    case = CASES["plain"]
    given, model = preference_rows(**case.rows) if rows is None else rows, case.model if model is None else model
    key = golden.digest(folder, given, model, {"eval_rows": None} | case.config | config)
    return golden._recorded("reward/plain", key)


def test_a_recording_is_that_of_its_source(checkpoint):
    run = recorded(checkpoint(), batch_layout="packed")  # an argument that TRL does not have
    assert len(run.logs) == 31 and all(isinstance(kept, Sketch) for kept in run.weights.values())


CHANGED = {"rows": preference_rows(119), "learning_rate": 1e-4, "model": {"seed": 1}}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_source_names_the_command_that_records_it(name, checkpoint):
    with pytest.raises(AssertionError, match="'plain' is of the source .* have changed since") as error:
        recorded(checkpoint(), **{name: CHANGED[name]})
    assert golden.COMMAND in str(error.value) and "LIVE=1" in str(error.value)


def test_another_checkpoint_is_another_source(checkpoint):
    with pytest.raises(AssertionError, match="have changed since"):
        recorded(checkpoint(num_hidden_layers=2))


def test_a_case_that_was_never_recorded_names_the_command():
    with pytest.raises(AssertionError, match=r"reward.json has no recording of TRL's run 'new'") as error:
        golden._recorded("reward/new", "0")
    assert golden.COMMAND in str(error.value)


def test_another_release_of_trl_needs_another_recording(checkpoint, monkeypatch):
    monkeypatch.setattr(golden, "version", lambda name: "9.9")
    with pytest.raises(AssertionError, match="is recorded of trl 1.16.0, and 9.9 is installed"):
        recorded(checkpoint())


def test_a_wrong_recording_is_noticed(checkpoint):
    run = dataclasses.replace(recorded(checkpoint()), weights={})
    golden._assert_still_so("reward/plain", run, run)
    logs = [entry | {"loss": entry["loss"] + 1e-3} if entry.get("step") == 7 else entry for entry in run.logs]
    with pytest.raises(AssertionError, match="TRL's run is not what was recorded of it"):
        golden._assert_still_so("reward/plain", run, dataclasses.replace(run, logs=logs))


def test_recordings_are_small():
    assert 5e5 < sum(path.stat().st_size for path in golden.FOLDER.glob("*.json")) < 2.5e6


# Sketches

TENSOR = np.random.default_rng(0).normal(size=(120, 64)).astype(np.float32)


@pytest.mark.parametrize("tensor", [TENSOR, TENSOR[0], TENSOR[0, :1], TENSOR.astype(np.float16)])
def test_a_sketch_is_packed_and_unpacked(tensor):
    kept = unpacked(sketch("a", tensor).packed())
    assert (kept.dtype, kept.shape) == (tensor.dtype, tensor.shape) and gap("a", tensor, kept) < 1e-5
    assert_same_weights({"a": tensor}, {"a": kept}, 1e-5)


def broken(tensor):
    noise = np.random.default_rng(1).normal(size=tensor.shape).astype(np.float32)
    yield "every element, by chance", tensor + 1e-3 * noise
    yield "every element, alike", tensor + 1e-3
    yield "scaled", tensor * 1.001
    yield "exchanged", tensor[::-1]
    row = tensor.copy()
    row[17] += 1e-2
    yield "one row", row


@pytest.mark.parametrize(("how", "tensor"), broken(TENSOR), ids=[how for how, _ in broken(TENSOR)])
def test_a_sketch_notices_what_is(how, tensor):
    with pytest.raises(AssertionError, match="apart by"):
        assert_same_weights({"a": tensor}, {"a": sketch("a", TENSOR)}, 2e-4)


def test_a_nan_is_noticed():
    tensor = TENSOR.copy()
    tensor[5, 5] = np.nan
    with pytest.raises(AssertionError, match="apart by nan"):
        assert_same_weights({"a": tensor}, {"a": sketch("a", TENSOR)}, 2e-4)
