"""Continuing after signals, changed arguments, third-party checkpoints and callbacks that raise.

The number in a test's name is that of the case in the project's table of faults.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from datasets import IterableDataset
from transformers import TrainerCallback

import trl_jax
from compat_tests.effort import only_thorough
from compat_tests.light import IMPORTS
from compat_tests.tiny import preference_rows
from compat_tests.trainer.trainers import FACTS, checkpoints, make, stream, table
from trl_jax.training import resume
from trl_jax.training.checkpoint_files import write_manifest
from trl_jax.training.events import Interrupts

CONFIG = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 3, "gradient_accumulation_steps": 2}


class At(TrainerCallback):
    """Does something at the end of one step."""

    def __init__(self, step, what):
        self.step, self.what = step, what

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.what(control)


@pytest.fixture
def folder(checkpoint):
    return checkpoint(**FACTS)


@pytest.fixture
def train(folder, tmp_path):
    def run(name, resume=None, train=None, callbacks=(), package=trl_jax, **config):
        rows = table(32) if train is None else train
        trainer = make(package, folder, tmp_path / name, train=rows, config=CONFIG | config, callbacks=[*callbacks])
        run.last = trainer
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


def weights(trainer):
    return jax.tree.map(np.asarray, trainer.model.params)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_row12_a_signal_lets_the_step_finish_and_saves_it(number, code, train, tmp_path, capfd, heard):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as left:
        train("broken", callbacks=[At(1, lambda control: os.kill(os.getpid(), number))])
    assert left.value.code == code and signal.getsignal(number) == before
    assert checkpoints(tmp_path / "broken") == ["checkpoint-1"]
    told = capfd.readouterr().err
    assert f"trl_jax: {number.name}: finishing this step, then saving a checkpoint and leaving. Send it again" in told
    assert f"trl_jax: {number.name}: leaving." in told
    jax.tree.map(np.testing.assert_array_equal, weights(train("broken", True)), weights(train("whole")))


def test_row12_without_checkpoints_it_says_that_none_is_saved(train, tmp_path, capfd):
    with pytest.raises(SystemExit):
        train("run", callbacks=[At(1, lambda control: os.kill(os.getpid(), signal.SIGTERM))], save_strategy="no")
    assert os.listdir(tmp_path / "run") == []
    assert "leaving without a checkpoint (save_strategy='no')" in capfd.readouterr().err


def test_row12_a_second_signal_ends_the_process_at_once():
    code = (
        "import os, signal\nfrom trl_jax.training.events import Interrupts\n"
        "with Interrupts().handling_signals('saving'):\n"
        "    for _ in range(2):\n        os.kill(os.getpid(), signal.SIGTERM)\n    print('still here')"
    )
    done = subprocess.run([sys.executable, "-c", IMPORTS + code], capture_output=True, text=True)
    assert done.returncode == 143 and done.stdout == ""
    assert "SIGTERM again: leaving at once, without saving." in done.stderr


def test_row12_outside_the_main_thread_signals_are_left_alone():
    seen = []

    def run():
        with Interrupts().handling_signals("saving"):
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start(), thread.join()
    assert seen == [before]


@only_thorough
def test_row20_every_changed_argument_is_listed(train, caplog):
    train("run", max_steps=2)
    with caplog.at_level(logging.WARNING, logger="trl_jax"):
        train("run", True, learning_rate=1e-3, seed=7, data_seed=42, max_steps=3, per_device_train_batch_size=2)
    [line] = [record.message for record in caplog.records if "other arguments" in record.message]
    changed = "data_seed: None -> 42; learning_rate: 0.0005 -> 0.001; max_steps: 2 -> 3; per_dev"
    assert f"checkpoint-2 was saved with: {changed}" in line
    assert "per_device_train_batch_size: 4 -> 2; seed: 42 -> 7." in line


@pytest.mark.parametrize("rows", [table(31), table(32, seed=1)])
def test_row20_another_dataset_is_refused(rows, train, tmp_path):
    train("run", max_steps=2)
    with pytest.raises(ValueError) as error:
        train("run", True, train=rows)
    assert str(error.value).startswith(f"train_dataset is not the one {tmp_path / 'run'}/checkpoint-2 was trained on")
    assert "or ignore_data_skip=True to restart the epoch" in str(error.value)
    assert train("run", True, train=rows, ignore_data_skip=True, max_steps=4).state.global_step == 4


@pytest.mark.parametrize(
    ("then", "now", "named"),
    [
        ({}, {"seed": 7}, ("data_seed=42", "data_seed=7")),
        ({"data_seed": 1}, {"data_seed": 2}, ("data_seed=1", "data_seed=2")),
        ({}, {"train_sampling_strategy": "sequential"}, ("train_sampling_strategy='random'", "='sequential'")),
        (
            {"train_sampling_strategy": "group_by_length"},
            {"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 1},
            ("examples a step=8", "examples a step=4"),
        ),
    ],
)
def test_row20_another_order_is_refused_within_an_epoch(then, now, named, train):
    train("run", max_steps=2, **then)
    with pytest.raises(ValueError, match="was saved in the middle of an epoch whose row order came from") as error:
        train("run", True, max_steps=4, **now)
    assert all(name in str(error.value) for name in named) and "or ignore_data_skip=True to restart" in str(error.value)
    assert train("run", True, max_steps=3, ignore_data_skip=True, **now).state.global_step == 3


def test_row20_between_epochs_another_order_is_as_good(train):
    train("run", num_train_epochs=1, save_strategy="epoch")
    assert train("run", True, num_train_epochs=2, seed=7).state.global_step == 8


def test_row20_other_libraries_are_told_of_once(train, monkeypatch, caplog):
    train("run", max_steps=2)
    now = resume.libraries()
    monkeypatch.setattr(resume, "libraries", lambda: now | {"jax": "9.9", "transformers": "8.8"})
    with caplog.at_level(logging.WARNING, logger="trl_jax"):
        train("run", True, max_steps=3)
    [line] = [record.message for record in caplog.records if "other library versions" in record.message]
    assert f"saved with: jax: {now['jax']} -> 9.9; transformers: {now['transformers']} -> 8.8." in line


@pytest.mark.parametrize(
    ("file", "name", "value", "text"),
    [
        ("trainer_state.json", "global_step", -5, "global_step must be a whole number of at least 0, got -5"),
        ("trainer_state.json", "global_step", 3, "global_step is 3, but manifest.json says 2"),
        ("trainer_state.json", "epoch", 1e9, "epoch must be from 0 to"),
        ("trainer_state.json", "epoch", float("nan"), "epoch must be from 0 to"),
        ("training_state/facts.json", "epoch", 10**9, "epoch is 1000000000, which a run of 2 steps has not reached"),
        ("training_state/facts.json", "examples", -1, "examples must be a whole number of at least 0, got -1"),
        ("training_state/facts.json", "examples", 99, "examples is 99, and train_dataset has 32 rows"),
    ],
)
def test_row20_numbers_that_cannot_be_are_named_with_their_file(file, name, value, text, train, tmp_path):
    train("run", max_steps=2)
    folder = tmp_path / "run" / "checkpoint-2"
    facts = json.loads((folder / file).read_text())
    (facts if file == "trainer_state.json" else facts["progress"])[name] = value
    (folder / file).write_text(json.dumps(facts))
    (folder / "manifest.json").unlink()
    write_manifest(folder, {"step": 2, "dataset": train.last.parts.checkpointer.dataset_fingerprint()})
    with pytest.raises(ValueError) as error:
        train("run", str(folder), max_steps=4)
    assert str(folder / file) in str(error.value) and text in str(error.value)


def test_row20_another_stream_is_refused(train):
    train("run", max_steps=2, train=stream(32))
    rows = preference_rows(32)
    rows[15], rows[3] = rows[3], rows[15]
    other = IterableDataset.from_generator(lambda: iter(rows))
    with pytest.raises(ValueError, match="not the stream that the checkpoint was trained on: its first 16 rows differ"):
        train("run", True, train=other, max_steps=4)
    with pytest.raises(ValueError, match="its first 16 rows differ"):
        train("run", True, train=stream(9), max_steps=4)
    train("run", True, train=other, max_steps=3, ignore_data_skip=True)


def test_row20_a_checkpoint_of_the_model_alone_goes_on_as_in_trl(train, tmp_path, caplog):
    trl = pytest.importorskip("trl")
    config = {"logging_steps": 1, "warmup_steps": 1}
    found = {}
    for name, package in (("theirs", trl), ("ours", trl_jax)):
        train(name, max_steps=2, save_only_model=True, package=package, **config)
        again = train(name, True, max_steps=6, package=package, **config)
        found[name] = [log for log in again.state.log_history if "grad_norm" in log][2:]
    assert not (tmp_path / "ours" / "checkpoint-2" / "training_state").exists()
    assert caplog.text.count("holds only the model (save_only_model=True): the step and the place in") == 1
    (tmp_path / "theirs" / "checkpoint-2").rename(tmp_path / "of trl")
    here = train("here", str(tmp_path / "of trl"), max_steps=6, **config)
    found["trl's here"] = [log for log in here.state.log_history if "grad_norm" in log][2:]
    later = train("ours", str(tmp_path / "ours" / "checkpoint-4"), max_steps=6, **config)  # a complete checkpoint
    found["twice"] = [log for log in later.state.log_history if "grad_norm" in log][2:]
    for name in ("ours", "trl's here", "twice"):
        for own, other in zip(found[name], found["theirs"], strict=True):
            assert own["step"] == other["step"]
            for key, mark in (("loss", 1e-5), ("grad_norm", 2e-4), ("learning_rate", 1e-12)):
                assert abs(own[key] - other[key]) <= mark, (name, own["step"], key)
    assert found["ours"][0]["learning_rate"] == 0 < found["ours"][1]["learning_rate"]  # the warmup is repeated


@pytest.fixture(scope="module")
def trls(checkpoint, tmp_path_factory):
    """A TRL run with a checkpoint in the middle, and its result."""
    trl = pytest.importorskip("trl")
    out = tmp_path_factory.mktemp("trl")
    # TRL reloads all of its checkpoint only with some torch versions, so its uninterrupted run is the reference.
    trainer = make(trl, checkpoint(**FACTS), out, train=table(32), config=CONFIG | {"num_train_epochs": 2})
    trainer.train()
    return out, trainer


def test_row21_a_run_of_trls_goes_on_here(trls, train):
    out, theirs = trls
    ours = train("ours", str(out / "checkpoint-2"), num_train_epochs=2)
    assert ours.state.global_step == theirs.state.global_step == 8
    steps = [{log["step"]: log for log in t.state.log_history if "grad_norm" in log} for t in (ours, theirs)]
    assert steps[0].keys() == steps[1].keys() == {3, 6}
    for name, mark in (("loss", 1e-5), ("grad_norm", 2e-4), ("learning_rate", 1e-12)):
        assert abs(steps[0][6][name] - steps[1][6][name]) <= mark, name
    counted = [run[6]["num_tokens"] - run[3]["num_tokens"] for run in steps]  # the earlier ones had not been logged yet
    assert counted[0] == counted[1]
    expected = {name: value.detach().numpy() for name, value in theirs.model.named_parameters()}
    np.testing.assert_allclose(ours.model.params["score.weight"], expected["score.weight"], rtol=0, atol=2e-4)
    assert ours.parts.setup.progress.optimizer_state[1].count == 8


def test_row21_at_the_end_of_an_epoch(trls, train):
    ours = train("ours", str(trls[0] / "checkpoint-4"), num_train_epochs=2)
    assert (ours.state.global_step, ours.state.epoch) == (8, 2.0)


def test_row21_without_torch_it_says_what_restarts(trls, train, monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, logger="trl_jax"):
        ours = train("ours", str(trls[0] / "checkpoint-6"), num_train_epochs=2)
    assert "optimizer.pt requires torch, which is not installed: AdamW's moments restart from zero." in caplog.text
    assert ours.parts.setup.progress.optimizer_state[1].count == 2


class Malicious:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (self.mark, "w")


@pytest.mark.parametrize("content", ["malicious", "cut", "of another model"])
def test_row21_an_optimizer_that_cannot_be_taken_over(content, trls, train, tmp_path):
    folder = shutil.copytree(trls[0] / "checkpoint-2", tmp_path / "checkpoint-2")
    path = folder / "optimizer.pt"
    if content == "malicious":
        path.write_bytes(pickle.dumps(Malicious(str(tmp_path / "mark"))))
    elif content == "cut":
        path.write_bytes(path.read_bytes()[:2000])
    else:
        import torch

        torch.save({"state": {}, "param_groups": []}, path)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        train("ours", str(folder))
    assert not (tmp_path / "mark").exists()


def test_row38_a_stream_that_ends_early_has_its_state_saved(train, tmp_path, caplog):
    rows, passes = preference_rows(12), []

    def once():
        passes.append(1)
        yield from rows if len(passes) <= 3 else ()  # two passes are for looking at the first row

    trainer = train("run", train=IterableDataset.from_generator(once), max_steps=40, save_steps=1)
    step = trainer.state.global_step
    assert f"train_dataset ended before max_steps=40: training stops at step {step}." in caplog.text
    state = json.loads((tmp_path / f"run/checkpoint-{step}/trainer_state.json").read_text())
    assert state["global_step"] == step


def test_row45_a_callback_that_raises_may_have_asked_for_a_save(train, tmp_path):
    def wish(control):
        control.should_save = True
        raise RuntimeError("my own")

    with pytest.raises(RuntimeError, match="my own"):
        train("run", callbacks=[At(1, wish)])
    assert checkpoints(tmp_path / "run") == ["checkpoint-1"]
    assert train("run", True).state.global_step == 4

    def no_wish(control):
        raise RuntimeError("my own")

    with pytest.raises(RuntimeError, match="my own"):
        train("other", callbacks=[At(1, no_wish)])
    assert os.listdir(tmp_path / "other") == []


def test_row44_a_folder_that_another_run_writes(train, tmp_path):
    def second(control):
        with pytest.raises(RuntimeError, match="is being written by another run"):
            train("run")
        seen.append(SimpleNamespace(left=sorted(os.listdir(tmp_path / "run"))))

    seen = []
    train("run", callbacks=[At(1, second)])
    assert seen[0].left == [".trl_jax.lock"] and ".trl_jax.lock" not in os.listdir(tmp_path / "run")
