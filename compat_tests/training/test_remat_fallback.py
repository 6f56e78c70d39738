"""`auto_find_batch_size`: if a run does not fit, it restarts with fewer pairs per step, as if it had started that
way."""

from __future__ import annotations

import logging

import jax
import numpy as np
import pytest

import trl_jax
from compat_tests.trainer.trainers import FACTS, Uncompiled, make, table
from trl_jax.training import step

CONFIG = {
    "batch_layout": "padded", "per_device_train_batch_size": 7, "max_steps": 2, "logging_steps": 1,
    "remat_policy": "nothing_saveable",
}  # fmt: skip
TOO_MUCH = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nat")


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**FACTS)


@pytest.fixture
def memory_for(monkeypatch):
    """memory_for(pairs, first): from step `first` of an attempt on, steps with more pairs run out of memory and lose
    their (donated) arrays."""
    real = step.make_step

    def limited(pairs, first=1):
        def make_step(*given):
            step, taken = real(*given), []

            def tight(params, opt_state, batch, *rest):
                taken.append(None)
                if len(taken) < first or batch.weight.shape[-1] <= pairs:
                    return step(params, opt_state, batch, *rest)
                jax.tree.map(lambda leaf: leaf.delete(), (params, opt_state))
                raise TOO_MUCH

            return Uncompiled(tight)

        monkeypatch.setattr(step, "make_step", make_step)

    return limited


def logs(trainer):
    clock = ("runtime", "per_second")
    return [{k: v for k, v in log.items() if not k.endswith(clock)} for log in trainer.state.log_history]


def test_a_run_that_does_not_fit_begins_again(folder, tmp_path, memory_for, caplog):
    wanted = make(trl_jax, folder, tmp_path / "six", config=CONFIG | {"per_device_train_batch_size": 6})
    wanted.train()
    memory_for(6, first=2)
    config = CONFIG | {"auto_find_batch_size": True, "save_strategy": "steps", "save_steps": 1}
    trainer = make(trl_jax, folder, tmp_path / "found", config=config)
    with caplog.at_level(logging.WARNING, "trl_jax"):
        trainer.train()
    said = [text for text in caplog.messages if "starting again" in text]
    assert said == ["Step 2 does not fit into memory with per_device_train_batch_size=7: starting again with 6."]
    assert trainer.state.train_batch_size == 6 and trainer.args.per_device_train_batch_size == 7
    jax.tree.map(np.testing.assert_array_equal, trainer.model.params, wanted.model.params)
    assert logs(trainer) == logs(wanted)

    memory_for(6)
    caplog.clear()
    again = make(trl_jax, folder, tmp_path / "found", config=config)
    again.train(resume_from_checkpoint=str(tmp_path / "found/checkpoint-1"))
    assert again.state.train_batch_size == 6 and not any("starting again" in text for text in caplog.messages)
    jax.tree.map(np.testing.assert_array_equal, again.model.params, wanted.model.params)


def test_nothing_fits(folder, tmp_path, memory_for, caplog):
    memory_for(0)
    trainer = make(trl_jax, folder, tmp_path, config=CONFIG | {"auto_find_batch_size": True})
    with pytest.raises(MemoryError, match="^Step 1 does not fit .* Lower per_device_train_batch_size=1 "):
        trainer.train()
    sizes = [text.split()[-1] for text in caplog.messages if "again" in text]
    assert sizes == [f"{size}." for size in (6, 5, 4, 3, 2, 1)]


def test_an_evaluation_that_does_not_fit_is_no_reason_for_smaller_steps(folder, tmp_path, monkeypatch):
    config = CONFIG | {"auto_find_batch_size": True, "eval_strategy": "steps", "eval_steps": 1}
    trainer = make(trl_jax, folder, tmp_path, config=config, eval_dataset=table(4))

    def evaluate():
        raise TOO_MUCH

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    with pytest.raises(MemoryError, match="The evaluation after step 1 does not fit into memory. Lower per"):
        trainer.train()
    assert trainer.state.train_batch_size == 7
