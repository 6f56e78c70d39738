"""The training loop against transformers' Trainer: the same events at the same steps, and the same folders."""

from __future__ import annotations

import logging

import pytest
from transformers import EarlyStoppingCallback
from transformers.trainer_callback import TrainerCallback

from compat_tests.training.runs import run_loop, run_transformers

STEPS = {"eval_strategy": "steps", "eval_steps": 2}
SAVES = {"save_strategy": "steps", "save_steps": 2}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "m"}


class Ask(TrainerCallback):
    """Sets flags of `control` at the end of one step."""

    def __init__(self, step, *flags):
        self.step, self.flags = step, flags

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            for flag in self.flags:
                setattr(control, flag, True)


RUNS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "logging_steps": 1},
    "one micro-batch a ragged step": {"gradient_accumulation_steps": 4, "num_train_epochs": 2},
    "first step logged": {"logging_first_step": True, "logging_steps": 3},
    "logs by epoch": {"logging_strategy": "epoch", "num_train_epochs": 2},
    "no logs": {"logging_strategy": "no"},
    "half an epoch more": {"num_train_epochs": 1.5, **STEPS},
    "max_steps": {"max_steps": 7, "num_train_epochs": 1},
    "max_steps within an epoch": {"max_steps": 3, **STEPS, **SAVES},
    "everything by steps": {**STEPS, **SAVES, "num_train_epochs": 1, "eval_on_start": True},
    "evaluation and saves at their own pace": {
        **STEPS,
        "save_strategy": "steps",
        "save_steps": 3,
        "num_train_epochs": 2,
    },
    "everything by epoch": {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 2},
    "evaluation by epoch, saves by steps": {
        "eval_strategy": "epoch",
        **SAVES,
        "save_steps": 5,
        "metric_for_best_model": "m",
        "metrics": [3, 4],
        "num_train_epochs": 2,
        "greater_is_better": False,
    },
    "delayed evaluation": {**STEPS, "eval_delay": 3, "num_train_epochs": 2},
    "stop at step 2": {"callbacks": [(2, "should_training_stop")], **STEPS, **SAVES},
    "stop the epoch": {"callbacks": [(2, "should_epoch_stop")], "num_train_epochs": 2, "logging_steps": 1},
    "all at once": {"callbacks": [(3, "should_log", "should_evaluate", "should_save")]},
    "no epoch": {"num_train_epochs": 0},
    "two kept": {**SAVES, "save_total_limit": 2, "num_train_epochs": 2},
    "best and newest kept": {
        **STEPS,
        **SAVES,
        **BEST,
        "save_total_limit": 2,
        "num_train_epochs": 2,
        "metrics": [1, 9, 3, 4, 5],
        "greater_is_better": True,
    },
    "only the best kept": {
        **STEPS,
        **SAVES,
        **BEST,
        "save_total_limit": 1,
        "num_train_epochs": 2,
        "metrics": [4, 1, 3, 4, 5],
        "greater_is_better": False,
    },
    "only the best saved": {
        **STEPS,
        "save_strategy": "best",
        "metric_for_best_model": "m",
        "num_train_epochs": 2,
        "metrics": [4, 5, 3, 3, 1],
        "greater_is_better": False,
    },
    "only the best saved, though another is asked for": {
        **STEPS,
        "save_strategy": "best",
        "metric_for_best_model": "m",
        "num_train_epochs": 1,
        "metrics": [4, 5, 3],
        "greater_is_better": False,
        "callbacks": [(4, "should_save")],
    },
    "best, evaluated by epoch": {
        "eval_strategy": "epoch",
        "save_strategy": "best",
        "metric_for_best_model": "eval_m",
        "num_train_epochs": 3,
        "metrics": [4, 5, 6],
        "greater_is_better": True,
    },
    "a metric that is not a number": {
        **STEPS,
        **SAVES,
        **BEST,
        "num_train_epochs": 1,
        "metrics": [float("nan"), 2, 3],
        "greater_is_better": False,
    },
    "remembered without saving": {
        **STEPS,
        "metric_for_best_model": "m",
        "metrics": [3, 2, 1],
        "num_train_epochs": 1,
    },
    "stopping early": {
        **STEPS,
        **SAVES,
        **BEST,
        "metrics": [5, 4, 6, 7, 8, 9],
        "num_train_epochs": 4,
        "greater_is_better": False,
        "callbacks": [2],
    },
    "stopping early by epoch": {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        **BEST,
        "metrics": [5, 4, 4, 4],
        "num_train_epochs": 4,
        "greater_is_better": True,
        "callbacks": [1],
    },
}


def callbacks_of(run):
    """Callbacks from a case: a tuple is an Ask, a number an EarlyStoppingCallback's patience. New ones for every
    run."""
    made = [Ask(*ask) if isinstance(ask, tuple) else EarlyStoppingCallback(ask) for ask in run.get("callbacks", [])]
    return {"num_train_epochs": 2} | run | {"callbacks": made}


@pytest.mark.parametrize("name", RUNS)
def test_the_events_are_transformers(name, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    ours = run_loop(tmp_path / "ours", **callbacks_of(RUNS[name]))
    theirs = run_transformers(tmp_path / "theirs", **callbacks_of(RUNS[name]))
    assert ours.events == theirs.events
    assert ours.facts() == theirs.facts()


def test_early_stopping_stops(tmp_path):
    run = run_loop(tmp_path, **callbacks_of(RUNS["stopping early"]))
    assert run.state.global_step == 8 and run.state.best_global_step == 4


def test_substeps_stand_before_the_optimizer_step(tmp_path):
    run = run_loop(tmp_path, rows=10, gradient_accumulation_steps=3, num_train_epochs=1)
    step = [
        "on_step_begin",
        *["on_substep_end"] * 2,
        "on_pre_optimizer_step",
        "on_optimizer_step",
        "on_step_end",
    ]
    ragged = [name for name in step if name != "on_substep_end"]
    ragged.insert(1, "on_substep_end")
    names = [name for name, *_ in run.events]
    assert names == ["on_train_begin", "on_epoch_begin", *step, *ragged, "on_log", "on_epoch_end"]
    assert [epoch for name, _, epoch in run.events if name == "on_step_end"] == [0.6, 1.0]


def test_a_report_holds_the_mean_loss_and_every_step_since_the_last(tmp_path):
    run = run_loop(tmp_path, rows=10, logging_steps=2, num_train_epochs=1)
    assert [(log["loss"], log["learning_rate"], log["steps"]) for log in run.logs[:-1]] == [
        (0.5, pytest.approx(0.8), 2),
        (2.5, pytest.approx(0.4), 2),
    ]
    assert run.logs[-1] == {"train_loss": 2.0, "steps": 1}


def test_steps_that_an_evaluation_followed_are_not_reported_at_the_end(tmp_path):
    run = run_loop(tmp_path, rows=10, logging_steps=2, num_train_epochs=1, eval_strategy="steps", eval_steps=5)
    assert run.logs[-1] == {"train_loss": 2.0, "steps": 0}


def test_steps_after_the_last_evaluation_are_reported_at_the_end(tmp_path):
    run = run_loop(tmp_path, rows=10, logging_steps=3, num_train_epochs=1, callbacks=[Ask(2, "should_evaluate")])
    assert run.logs[-1] == {"train_loss": 2.0, "steps": 2}


def test_batches_that_run_out_end_the_run_with_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        run = run_loop(tmp_path, rows=2, max_steps=40, empty_from=1)
    steps = run.state.global_step
    assert 0 < steps < 40
    assert f"train_dataset ended before max_steps=40: training stops at step {steps}." in caplog.text


def test_a_run_without_a_batch_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="yielded no batch, so there is nothing to train on"):
        run_loop(tmp_path, rows=10, max_steps=4, empty_from=0)
