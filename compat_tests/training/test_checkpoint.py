"""Checkpoint folders get their final name only when complete; the best one is kept; errors name the cause."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import SaveStrategy

from compat_tests.training.runs import run_loop
from trl_jax.training.checkpoint_files import forget_all_but_best, is_new_best, write_manifest

SAVES = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 1}


def asked(metric="m", greater=True, save=SaveStrategy.STEPS):
    return SimpleNamespace(metric_for_best_model=metric, greater_is_better=greater, save_strategy=save)


def test_a_checkpoint_has_no_name_before_it_is_complete(tmp_path):
    seen = []

    def write(folder):
        (folder / "weights").write_text("half")
        seen.append(sorted(path.name for path in tmp_path.iterdir()))

    run = run_loop(tmp_path, write_model=write, **SAVES)
    assert seen[0] == [".checkpoint-2.unfinished"]
    assert seen[1] == [".checkpoint-4.unfinished", "checkpoint-2"]
    assert run.folders == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]


def test_a_write_that_fails_leaves_no_checkpoint_and_does_not_stand_in_the_way(tmp_path):
    def write(folder):
        (folder / "weights").write_text("half")
        (folder / "more").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run_loop(tmp_path, write_model=write, **SAVES)
    assert not list(tmp_path.glob("checkpoint-*"))
    run_loop(tmp_path, **SAVES)
    assert sorted(path.name for path in (tmp_path / "checkpoint-2").iterdir()) == [
        "manifest.json",
        "trainer_state.json",
        "weights",
    ]
    assert not list(tmp_path.glob(".checkpoint-*"))


def test_a_folder_of_somebody_elses_is_set_aside(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "old").write_text("left over")
    run_loop(tmp_path, **SAVES)
    assert not (tmp_path / "checkpoint-2" / "old").exists()
    assert (tmp_path / "checkpoint-2-run-unknown" / "old").read_text() == "left over"


def test_the_state_is_in_the_checkpoint(tmp_path):
    run_loop(tmp_path, **SAVES)
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert (state["global_step"], state["max_steps"], state["epoch"]) == (4, 5, 0.8)
    assert TrainerState.load_from_json(str(tmp_path / "checkpoint-4" / "trainer_state.json")).save_steps == 2


@pytest.mark.parametrize("strategy", ["no", "steps", "epoch", "best"])
def test_when_it_is_saved(tmp_path, strategy):
    run = run_loop(
        tmp_path,
        **(SAVES | {"save_strategy": strategy, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 3}),
        metric_for_best_model="m",
        greater_is_better=True,
        metrics=[2, 1, 3],
    )
    wanted = {"no": [], "steps": [3, 5], "epoch": [5], "best": [2, 5]}
    assert run.folders == [f"checkpoint-{step}" for step in wanted[strategy]]


def test_all_but_the_best_are_forgotten(tmp_path):
    whose = {"checkpoint-2": "a", "checkpoint-10": "a", "checkpoint-4": "a", "checkpoint-6": "b", "final": "a"}
    for name, run in whose.items():
        (tmp_path / name).mkdir()
        write_manifest(tmp_path / name, {"step": 0, "run": run})
    (tmp_path / "checkpoint-8").mkdir()  # of an unknown run
    forget_all_but_best(str(tmp_path), str(tmp_path / "checkpoint-4"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-6", "checkpoint-8", "final"]
    forget_all_but_best(str(tmp_path), str(tmp_path / "checkpoint-8"))
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(("greater", "best"), [(True, [True, False, True, False]), (False, [True, True, False, False])])
def test_the_best_is_the_one_that_beats_all_before(greater, best):
    state = TrainerState()
    found = []
    for state.global_step, value in enumerate([2.0, 1.0, 3.0, 3.0]):
        found.append(is_new_best({"eval_m": value}, asked(greater=greater), state))
    assert found == best
    assert (state.best_metric, state.best_global_step) == ((3.0, 2) if greater else (1.0, 1))


@pytest.mark.parametrize("value", [float("nan"), None])
@pytest.mark.parametrize("greater", [True, False])
def test_a_metric_that_is_no_number_is_never_the_best(greater, value):
    state = TrainerState(global_step=1)
    assert not is_new_best({"eval_m": value}, asked(greater=greater), state)
    assert state.best_metric == (float("-inf") if greater else float("inf"))  # as in transformers
    assert is_new_best({"eval_m": 1.0}, asked(greater=greater), state)


def test_nothing_is_asked_for():
    state = TrainerState()
    assert not is_new_best({}, asked(metric=None), state) and state.best_metric is None


@pytest.mark.parametrize("name", ["accurcy", "eval_accurcy"])
def test_an_unknown_metric_is_named_beside_those_there_are(name):
    with pytest.raises(KeyError) as error:
        is_new_best({"eval_loss": 1.0, "eval_accuracy": 0.5}, asked(metric=name), TrainerState())
    assert error.value.args[0] == (
        f"metric_for_best_model={name!r} asks for eval_accurcy, which the evaluation does not report. "
        "Reported: eval_loss, eval_accuracy."
    )
