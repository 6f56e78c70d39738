"""Signals at any time of a run: during a step, an evaluation, and after the last step."""

from __future__ import annotations

import json
import logging
import os
import pty
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import EarlyStoppingCallback, TrainerCallback

import trl_jax
from compat_tests.effort import usual
from compat_tests.light import IMPORTS
from compat_tests.trainer.trainers import FACTS, checkpoints, make, table
from compat_tests.training.test_resume import Draws, same
from trl_jax.training import train
from trl_jax.training.events import Interrupts
from trl_jax.training.push import HubPublisher

CONFIG = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 3, "per_device_train_batch_size": 2}
CONFIG |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2, "num_train_epochs": 2}


def term():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**FACTS)


@pytest.fixture
def trainer(folder, tmp_path):
    def made(name, *callbacks, sets=None, **config):
        given = {"callbacks": [*callbacks, Draws()], "eval_dataset": table(5, seed=1) if sets is None else sets}
        random.seed(5), np.random.seed(5)
        return make(trl_jax, folder, tmp_path / name, train=table(7), config=CONFIG | config, **given)

    return made


def killed_in_evaluation(trainer, number):
    """Train, sending SIGTERM in the `number`-th evaluation pass. Returns the number of passes."""
    passes, outputs = [], trainer.parts.evaluator._outputs

    def counted(*given, **options):
        passes.append(1)
        if len(passes) == number:
            term()
        return outputs(*given, **options)

    trainer.parts.evaluator._outputs = counted
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == 143
    return len(passes)


TWO = {"a": table(3, seed=1), "b": table(3, seed=2)}
BEST = {"metric_for_best_model": "eval_a_loss", "greater_is_better": True, "eval_steps": 1}
EVALUATIONS = {
    # the pass in which the signal is sent (each evaluation has two), the step before it, further arguments
    "the second evaluation": (3, 4, {}),
    "off the logs, unsaved so far": (1, 2, {"save_steps": 100}),
    "at the end of an epoch": (1, 4, {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}),
    "at the end of the run": (3, 8, {"eval_strategy": "epoch", "save_strategy": "epoch"}),
    "after a step that is the last": (1, 3, {"max_steps": 3, "eval_steps": 3}),
    "the second of two sets": (3, 2, {"sets": TWO, **BEST, "logging_steps": 1}),
    "to be saved when best": (3, 2, {"sets": TWO, **BEST, "save_strategy": "best", "load_best_model_at_end": True}),
}


@usual("the second evaluation", "off the logs, unsaved so far", "at the end of an epoch")
@pytest.mark.parametrize("name", EVALUATIONS)
def test_an_evaluation_is_broken_off_and_repeated_when_the_run_goes_on(name, trainer, tmp_path):
    number, step, config = EVALUATIONS[name]
    stopping = [EarlyStoppingCallback] if "sets" in config else []
    assert killed_in_evaluation(trainer("run", *(kind(2) for kind in stopping), **config), number) == number
    state = json.loads((tmp_path / f"run/checkpoint-{step}/trainer_state.json").read_text())
    assert not any("eval_loss" in log or "eval_a_loss" in log for log in state["log_history"] if log["step"] == step)
    again = trainer("run", *(kind(2) for kind in stopping), **config)
    again.train(resume_from_checkpoint=True)
    whole = trainer("whole", *(kind(2) for kind in stopping), **config)
    whole.train()
    for one in (again, whole):  # its flags are those of the last save, which may differ
        one.state.stateful_callbacks.pop("TrainerControl")
    same(again, whole)
    unasked = {f"checkpoint-{step}"} if name in ("off the logs, unsaved so far", "to be saved when best") else set()
    assert set(checkpoints(tmp_path / "whole")) == set(checkpoints(tmp_path / "run")) - unasked


def test_before_the_first_step_there_is_nothing_to_save(trainer, tmp_path):
    run = trainer("run", eval_on_start=True)
    assert killed_in_evaluation(run, 1) == 1 and os.listdir(tmp_path / "run") == []
    assert "eval_loss" in run.evaluate()  # the earlier signal does not interrupt it


class OnPrediction(TrainerCallback):
    def on_prediction_step(self, args, state, control, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_scripts_own_evaluation_is_left_to_python(trainer, heard):
    with pytest.raises(KeyboardInterrupt):
        trainer("run", OnPrediction()).evaluate()


class OnLastLog(TrainerCallback):
    def on_log(self, args, state, control, logs, **kwargs):
        if "train_runtime" in logs:
            term()


class OnTrainEnd(TrainerCallback):
    def on_train_end(self, args, state, control, **kwargs):
        term()


def left_by(trainer):
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == 143


def test_a_signal_with_the_closing_log_saves_the_last_step(trainer, tmp_path):
    config = {"save_strategy": "epoch", "logging_steps": 5, "eval_strategy": "no"}
    best = config | {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
    best |= {"metric_for_best_model": "loss", "greater_is_better": True}
    for name, given in (("saved", config), ("unsaved", best)):
        left_by(trainer(name, OnLastLog(), **given))
        last = checkpoints(tmp_path / name)[-1]
        assert last == f"checkpoint-{3 if name == 'unsaved' else 8}"
        again = trainer(name, **given)
        again.train(resume_from_checkpoint=True)
        whole = trainer(f"whole {name}", **given)
        whole.train()
        for one in (again, whole):
            one.state.stateful_callbacks = {}  # those of the last save, which differ
        same(again, whole)


def test_a_signal_while_the_best_checkpoint_is_read(trainer, tmp_path, monkeypatch):
    config = {"load_best_model_at_end": True, "eval_steps": 2}
    told, real = [], train.weights_of
    monkeypatch.setattr(train, "weights_of", lambda *given: (term(), time.sleep(60)))
    run, began = trainer("run", **config), time.monotonic()
    run.add_callback(SimpleCallback(told))
    left_by(run)
    assert time.monotonic() - began < 50 and told == []
    monkeypatch.setattr(train, "weights_of", real)
    again = trainer("run", **config)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 8


class SimpleCallback(TrainerCallback):
    def __init__(self, told):
        self.told = told

    def on_train_end(self, args, state, control, **kwargs):
        self.told.append("train_end")


def test_a_signal_in_the_last_callback_ends_the_script(trainer):
    left_by(trainer("run", OnTrainEnd(), max_steps=1, eval_strategy="no"))


def test_uploads_under_way_are_named_and_left(trainer, tmp_path, monkeypatch, caplog):
    run = trainer("run", max_steps=1, eval_strategy="no")
    monkeypatch.setattr(HubPublisher, "finish", lambda *given: (term(), time.sleep(60)))
    run._publisher._publisher = SimpleNamespace(
        running=True, failures=["it said no"], repo_id="me/model", uploading="mine", cut_off=lambda: None
    )
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="trl_jax"):
        left_by(run)
    assert time.monotonic() - began < 50 and "checkpoint-1" in os.listdir(tmp_path / "run")
    assert 'Exiting while the upload "mine" to me/model is running: it was aborted.' in caplog.text
    assert "1 pushes to me/model failed." in caplog.text and "it said no" in caplog.text


def test_a_hangup_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts().handling_signals("saving"):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interrupt_that_is_ignored_is_told_of_once(trainer, heard, capfd):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    trainer("run", max_steps=2, eval_strategy="no").train()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    told = capfd.readouterr().err
    assert told.count("SIGINT is ignored by this process, as in the background of a shell") == 1
    assert f"kill -TERM {os.getpid()} ends it: finishing the step, then saving a checkpoint and leaving.\n" in told
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer("heard", max_steps=1, eval_strategy="no").train()
    assert "SIGINT" not in capfd.readouterr().err


CLOSED = """
import fcntl, signal, sys, termios, time
from pathlib import Path
from trl_jax.training.events import Interrupts
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
interrupts = Interrupts()
with interrupts.handling_signals("saving"):
    print("it listens", flush=True)
    while interrupts.received is None:
        time.sleep(0.01)
    print("a progress bar", file=sys.stderr, flush=True)
    print("another", flush=True)
    Path(sys.argv[1]).write_text(interrupts.received.name)
    interrupts.leave()
"""


def test_a_closed_terminal_does_not_keep_the_run_from_saving(tmp_path):
    main, terminal = pty.openpty()
    command = [sys.executable, "-c", IMPORTS + CLOSED, str(tmp_path / "saved")]
    child = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    seen = b""
    while b"it listens" not in seen:
        seen += os.read(main, 1000)
    os.close(main)
    assert child.wait(timeout=60) == 129 and (tmp_path / "saved").read_text() == "SIGHUP"


FORKED = """
import multiprocessing, os, signal, time
from trl_jax.hub.fetch import report_interruptions
from trl_jax.training.events import Interrupts
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
report_interruptions(lambda: ["pushing"])
forks = multiprocessing.get_context("fork")

def works_on(second):
    os.kill(os.getpid(), signal.SIGINT)
    print("working", flush=True)
    os.kill(os.getpid(), second)
    time.sleep(60)

def left(second):
    child = forks.Process(target=works_on, args=(second,))
    child.start()
    child.join()
    return child.exitcode

with Interrupts().handling_signals("saving"):
    ours = signal.getsignal(signal.SIGTERM)
    with forks.Pool(2) as pool:  # its end is SIGTERM
        print(pool.map(abs, [-1, 2]))
    print(*[left(second) for second in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)])
    print(signal.getsignal(signal.SIGTERM) == ours)
child = forks.Process(target=time.sleep, args=(60,))
child.start()
child.terminate()
child.join()
print(child.exitcode)
"""


def test_processes_forked_within_a_run_can_be_ended():
    done = subprocess.run([sys.executable, "-c", IMPORTS + FORKED], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n") == ["[1, 2]", *["working"] * 3, "-15 130 129", "True", "-15", ""], done.stderr
    assert "SIG" not in done.stderr and "pushing" not in done.stderr
