"""One output_dir, several runs: whose checkpoints are resumed from, removed and replaced, and the lock."""

from __future__ import annotations

import json
import logging
import os
import shutil

import jax
import numpy as np
import pytest
from transformers import TrainerCallback

import trl_jax
from compat_tests.faults.killed_saves import events_of
from compat_tests.trainer.trainers import FACTS, checkpoints, make, table
from trl_jax.training.checkpoint_files import LOCK, RECORD, only_run, record, run_of, save_checkpoint, sweep, verify
from trl_jax.training.resume import find

CONFIG = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 3}


class Killed(BaseException):
    """Ends a run without saving, because nothing catches it."""


class Kill(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed


@pytest.fixture
def train(checkpoint, tmp_path):
    def run(resume=None, callbacks=(), name="run", evaluated=False, **config):
        trainer = make(
            trl_jax, checkpoint(**FACTS), tmp_path / name, train=table(16), config=CONFIG | config,
            callbacks=[*callbacks], eval_dataset=table(4, seed=1) if evaluated else None,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def save(run_dir, step, run, limit=None):
    """Save a checkpoint of that run with one small file."""
    events = events_of(step)
    events.args.save_total_limit = limit
    save_checkpoint(str(run_dir), lambda folder: (folder / "weights").write_text(run), events, {"run": run})


names = checkpoints


def other(seed):
    return {"seed": seed, "learning_rate": 1e-3}


def test_a_limit_holds_for_a_run_that_is_begun_again(train, folder, caplog):
    """Its steps have the same names as those of the first run, which are replaced, as in TRL."""
    for _ in range(3):
        train(save_total_limit=1)
    assert [name for name in names(folder) if name.startswith("checkpoint")] == ["checkpoint-4"]
    assert "but replaces them if it needs their names" in caplog.text and "It was renamed" not in caplog.text


def test_a_second_run_goes_on_with_its_own_and_loses_nothing_of_the_first(train, folder, caplog):
    train()
    first = {path.name: run_of(path) for path in folder.glob("checkpoint-*")}
    assert len(set(first.values())) == 1 and list(first.values())[0]
    kept = (folder / "checkpoint-2/model.safetensors").read_bytes()
    with caplog.at_level(logging.WARNING), pytest.raises(Killed):
        train(callbacks=[Kill(3)], **other(7))
    [told] = [entry.message for entry in caplog.records if "checkpoints of other runs" in entry.message]
    assert told.startswith(f"output_dir={str(folder)!r} holds checkpoints of other runs: checkpoint-2, checkpoint-4.")
    aside = f"checkpoint-2-run-{first['checkpoint-2'][:8]}"
    assert names(folder) == [RECORD, "checkpoint-2", aside, "checkpoint-4"]
    assert (folder / aside / "model.safetensors").read_bytes() == kept
    assert f"{folder / 'checkpoint-2'} belongs to another run. It was renamed to {aside}." in caplog.text
    caplog.clear()
    resumed = train(True, **other(7))
    assert f"Resuming from {folder / 'checkpoint-2'}: step 2 of 4." in caplog.text
    whole = train(name="whole", **other(7))
    jax.tree.map(np.testing.assert_array_equal, resumed.model.params, whole.model.params)
    assert len({run_of(folder / name) for name in ("checkpoint-2", "checkpoint-4")}) == 1
    assert run_of(folder / "checkpoint-4") != first["checkpoint-4"]


def test_a_second_run_that_saved_nothing_does_not_end_as_the_first(train, folder, tmp_path):
    train()
    with pytest.raises(Killed):
        train(callbacks=[Kill(1)], **other(7))
    with pytest.raises(ValueError) as error:
        train(True, **other(7))
    assert str(error.value) == (
        f"No valid checkpoint found in output directory ({folder}). checkpoint-4, checkpoint-2 belong to another "
        "run than the latest one here. To resume from one of another run, pass its path. To train from the start, "
        "leave resume_from_checkpoint out."
    )
    first = train(str(folder / "checkpoint-2"))  # now the folder belongs to the first run again
    assert not (folder / RECORD).exists() and first.state.global_step == 4
    assert find(True, str(folder)).state.global_step == 4


def test_the_limit_and_the_best_are_of_this_run_only(train, folder):
    with pytest.raises(Killed):
        train(callbacks=[Kill(3)])
    theirs = run_of(folder / "checkpoint-2")
    (folder / "checkpoint-1").mkdir()
    (folder / "checkpoint-1" / "mine").write_text("my own notes")
    best = {"save_total_limit": 1, "load_best_model_at_end": True, "metric_for_best_model": "loss",
            "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}  # fmt: skip
    trainer = train(evaluated=True, **best, **other(7))
    assert (folder / "checkpoint-1-run-unknown" / "mine").read_text() == "my own notes"
    # Replaced by a checkpoint of this run with the same name.
    assert theirs not in map(run_of, folder.glob("checkpoint-*"))
    own = [path.name for path in folder.glob("checkpoint-*") if run_of(path) not in (theirs, None)]
    assert own == [os.path.basename(trainer.state.best_model_checkpoint)]


def test_rotation_counts_and_removes_this_runs_only(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, "a")
    (tmp_path / "checkpoint-0").mkdir()
    for step in (5, 6, 7):
        save(tmp_path, step, "b", limit=2)
    assert names(tmp_path) == [f"checkpoint-{step}" for step in (0, 1, 2, 3, 6, 7)]


def test_another_runs_checkpoint_is_never_the_best_of_this_one(tmp_path):
    save(tmp_path, 2, "a")
    events = events_of(4)
    events.state.best_global_step = 2  # this run did not save at this step
    save_checkpoint(str(tmp_path), lambda folder: None, events, {"run": "b"})
    assert events.state.best_model_checkpoint is None


def test_one_that_was_set_aside_is_still_its_runs_best_and_still_found(tmp_path):
    for step in (2, 4):
        save(tmp_path, step, "a" * 32)
    save(tmp_path, 4, "b" * 32)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-4-run-aaaaaaaa"]
    record(tmp_path, "a" * 32, fresh=False)
    assert find(True, str(tmp_path)).folder.name == "checkpoint-4-run-aaaaaaaa"
    save(tmp_path, 4, "a" * 32), save(tmp_path, 4, "b" * 32)
    assert "checkpoint-4-run-aaaaaaaa-2" in names(tmp_path)


def test_a_save_that_only_lacked_its_name_sets_the_other_aside(tmp_path):
    save(tmp_path, 4, "a")
    save(tmp_path / "b", 4, "b")
    (tmp_path / "b" / "checkpoint-4").rename(tmp_path / ".checkpoint-4.unfinished")
    (tmp_path / "b").rmdir()
    sweep(tmp_path)
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-4-run-a"]
    assert verify(tmp_path / "checkpoint-4")["run"] == "b" and verify(tmp_path / "checkpoint-4-run-a")["run"] == "a"


def test_without_a_record_several_runs_are_a_question(tmp_path):
    save(tmp_path, 2, "a" * 32), save(tmp_path, 4, "b" * 32)
    with pytest.raises(ValueError, match=r"of 2 runs: checkpoint-4 \(run bbbbbbbb\), checkpoint-2 \(run aaaaaaaa\)"):
        find(True, str(tmp_path))
    assert find(tmp_path / "checkpoint-2", str(tmp_path)).state.global_step == 2


def transformers_checkpoint(folder, step):
    (folder / f"checkpoint-{step}").mkdir(parents=True)
    (folder / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (folder / f"checkpoint-{step}" / "optimizer.pt").touch()


def test_one_of_transformers_is_taken_where_there_is_none_of_ours(tmp_path):
    transformers_checkpoint(tmp_path, 6)
    assert find(True, str(tmp_path)).state.global_step == 6
    record(tmp_path, "a", fresh=False)  # a run that resumed from it and was killed before saving
    assert find(True, str(tmp_path)).state.global_step == 6
    save(tmp_path, 4, "a")
    assert find(True, str(tmp_path)).state.global_step == 4
    assert find(tmp_path / "checkpoint-6", str(tmp_path)).state.global_step == 6
    record(tmp_path, "b", fresh=True)
    with pytest.raises(ValueError, match="checkpoint-4, checkpoint-6 belong to another run than the latest one here"):
        find(True, str(tmp_path))


def test_a_clean_folder_has_no_record(train, folder, caplog):
    train()
    assert names(folder) == ["checkpoint-2", "checkpoint-4"] and "other runs" not in caplog.text
    train(True, max_steps=6)
    assert names(folder) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert len({run_of(path) for path in folder.glob("checkpoint-*")}) == 1


def test_a_lock_is_the_file_not_its_name(tmp_path):
    folder = tmp_path / "run"
    first, second = only_run(str(folder)), only_run(str(folder))
    first.__enter__()
    shutil.rmtree(folder)
    second.__enter__()
    first.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="is being written by another run"), only_run(str(folder)):
        pass  # the second still holds the lock
    second.__exit__(None, None, None)
    assert names(folder) == []


def test_a_folder_that_is_removed_and_made_anew_is_locked_before_it_is_written(train, folder):
    """Two runs in one folder: the first notices before its next checkpoint and leaves the folder to the second."""

    class Removed(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            """Overriding on_save makes the trainer finish each checkpoint before the next step."""

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                shutil.rmtree(folder)
            if state.global_step == 3 and second is not None:
                shutil.rmtree(folder)
                second.__enter__()

    second = None
    train(callbacks=[Removed()])
    assert names(folder) == ["checkpoint-2", "checkpoint-4"]
    second = only_run(str(folder))
    with pytest.raises(RuntimeError, match="is being written by another run"):
        train(callbacks=[Removed()])
    assert names(folder) == [LOCK]
    second.__exit__(None, None, None)
    assert names(folder) == []


def test_a_renewed_lock_keeps_others_out(folder):
    with only_run(str(folder)) as lock:
        shutil.rmtree(folder)
        lock.renew()
        with pytest.raises(RuntimeError, match="is being written by another run"), only_run(str(folder)):
            pass
        lock.renew()
        assert names(folder) == [LOCK]
    assert names(folder) == []


def test_a_run_without_checkpoints_has_the_lock_too(train, folder):
    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(names(folder))

    seen = []
    train(callbacks=[Look()], save_strategy="no")
    assert seen == [[LOCK]] * 4 and names(folder) == []


@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
def test_a_lock_that_is_no_plain_file_is_refused(kind, tmp_path):
    target, lock = tmp_path / "precious", tmp_path / "run" / LOCK
    lock.parent.mkdir()
    if kind == "folder":
        lock.mkdir()
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.symlink_to(target)
    if kind == "link":
        target.write_text("precious")
    text = "is not a regular file, so it cannot be used as the run's lock"
    with pytest.raises(FileExistsError, match=text) as error, only_run(str(lock.parent)):
        pass
    assert error.value.filename == str(lock) and os.path.lexists(lock)
    assert target.read_text() == "precious" if kind == "link" else not target.exists()
