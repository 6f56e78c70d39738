"""Asynchronous checkpoints, written while training continues."""

from __future__ import annotations

import errno
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import TrainerCallback

import trl_jax
from compat_tests.trainer.trainers import FACTS, make, table
from trl_jax.training import checkpoint_files, checkpointer, devices
from trl_jax.training.checkpoint_files import MANIFEST, AsyncSaver, host_copy, verify

CONFIG = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}


@pytest.fixture
def train(checkpoint, tmp_path):
    def run(name, **arguments):
        trainer = make(trl_jax, checkpoint(**FACTS), tmp_path / name, train=table(16), config=CONFIG, **arguments)
        trainer.train()
        return tmp_path / name

    return run


class Looks(TrainerCallback):
    """Reads each checkpoint in on_save."""

    def __init__(self):
        self.seen = []

    def on_save(self, args, state, control, **kwargs):
        self.seen.append(verify(checkpoint_files.Path(args.output_dir) / f"checkpoint-{state.global_step}")["step"])


def test_steps_go_on_while_a_checkpoint_is_written_and_it_holds_what_was(train, monkeypatch):
    """The first checkpoint gets its manifest only after step 3; a run that waits for each checkpoint saves the same
    bytes."""
    third, real = threading.Event(), checkpoint_files.write_manifest

    class Tells(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                assert not os.path.exists(f"{args.output_dir}/checkpoint-2")
                third.set()

    def waits(folder, facts):
        assert third.wait(60), "step 3 did not come: the run waits for its checkpoint"
        real(folder, facts)

    looks = Looks()
    waited = train("waited", callbacks=[looks])
    assert looks.seen == [2, 4]
    monkeypatch.setattr(checkpoint_files, "write_manifest", waits)
    aside = train("aside", callbacks=[Tells()])
    for step in (2, 4):
        names = verify(waited / f"checkpoint-{step}")["files"].keys() - {"training_args.json", "trainer_state.json"}
        assert {"model.safetensors", "training_state/arrays.safetensors"} < names
        for name in names:
            one, other = ((folder / f"checkpoint-{step}" / name).read_bytes() for folder in (waited, aside))
            assert one == other, name


def test_a_disk_that_is_full_ends_the_run_at_the_next_step(train, monkeypatch, tmp_path):
    def full(folder, facts):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_files, "write_manifest", full)
    with pytest.raises(OSError, match="The checkpoint was not written; .*full has no earlier one"):
        train("full")
    assert not [name for name in os.listdir(tmp_path / "full") if name.startswith("checkpoint")]


@pytest.mark.parametrize("name", ["save_model", "_save_checkpoint"])
def test_a_method_that_a_script_sets_on_its_trainer_writes_each_checkpoint(name, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "host_copy", lambda tree: pytest.fail("copied, and written aside"))
    trainer = make(trl_jax, checkpoint(**FACTS), tmp_path / "run", train=table(16), config=CONFIG)
    method, called = getattr(trainer, name), []

    def own(*given, **options):
        called.append(trainer.state.global_step)
        return method(*given, **options)

    setattr(trainer, name, own)
    trainer.train()
    assert called == [2, 4] and verify(tmp_path / "run" / "checkpoint-4")


@pytest.mark.parametrize("name", ["compute_loss", "prediction_step", "training_step", "evaluation_loop"])
def test_a_method_set_on_a_trainer_that_would_be_passed_over_is_refused(name, checkpoint, tmp_path):
    trainer = make(trl_jax, checkpoint(**FACTS), tmp_path / "run", train=table(16), eval_dataset=table(4))
    setattr(trainer, name, lambda *given, **options: None)
    for call in (trainer.train, trainer.evaluate, lambda: trainer.predict(table(4))):
        with pytest.raises(TypeError, match=f"{name} was set on the trainer"):
            call()


def test_where_memory_is_short_the_run_waits(train, monkeypatch):
    monkeypatch.setattr(devices, "available_host_memory", lambda: 1000)
    monkeypatch.setattr(checkpointer, "host_copy", lambda tree: pytest.fail("copied"))
    assert (train("short") / "checkpoint-4" / MANIFEST).exists()


def test_an_error_of_the_run_is_not_hidden_by_one_of_the_writing(caplog):
    def fails():
        raise OSError("the disk")

    jobs = AsyncSaver()
    with pytest.raises(KeyError, match="the run"), jobs.settled():
        jobs.begin(fails)
        raise KeyError("the run")
    assert "the disk" in caplog.text
    with pytest.raises(OSError, match="the disk"), jobs.settled():
        jobs.begin(fails)
    jobs.settle()  # the error is raised only once


def test_the_copy_is_of_another_memory_and_leaves_the_array_free_to_be_donated():
    tree = {"a": jnp.arange(5.0), "b": jnp.ones(3, jnp.bfloat16), "c": jnp.int32(7)}
    kept = host_copy(tree)
    where = tree["a"].unsafe_buffer_pointer()
    given = jax.jit(lambda x: x + 1, donate_argnums=0)(tree["a"])
    assert given.unsafe_buffer_pointer() == where  # donated without a copy
    assert kept["a"].tolist() == [0, 1, 2, 3, 4] and kept["b"].dtype == jnp.bfloat16 and kept["c"] == 7
    assert all(isinstance(leaf, np.ndarray) for leaf in kept.values())


def test_spare_memory_is_no_more_than_the_machine_has():
    spare = devices.available_host_memory()
    assert spare is None or 0 < spare < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_containers_limit_is_the_hosts(tmp_path, monkeypatch):
    installed, spare = devices.host_memory(), devices.available_host_memory()
    monkeypatch.setattr(devices, "GROUP", tmp_path)
    assert devices.host_memory() >= installed
    (tmp_path / "memory.max").write_text("max\n")
    assert devices.host_memory() >= installed
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert devices.host_memory() == 1_000_000
    assert spare is None or devices.available_host_memory() == 600_000
