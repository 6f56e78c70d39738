"""NaN and infinite values in weights and steps; rows without information.

The number in a test's name is that of the case in the project's table of faults.
"""

from __future__ import annotations

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trl_jax
from compat_tests.effort import usual
from compat_tests.faults.broken import copied, edit_tensors, trainer
from compat_tests.trainer.trainers import FACTS, make
from trl_jax.training.failures import NonFiniteGuard, nan_trace

GOOD, BAD = {"chosen_ids": [5, 6], "rejected_ids": [7, 8]}, {"chosen_ids": [5, 500], "rejected_ids": [7]}


class Overflows(trl_jax.RewardTrainer):
    """The loss of rows with token 500 overflows."""

    def loss(self, params, batch, key, **how):
        loss, metrics = super().loss(params, batch, key, **how)
        return loss * jnp.exp(jnp.where((batch.tokens == 500).any(), 100.0, 0.0)), metrics


@pytest.fixture
def run(checkpoint, tmp_path):
    def build(rows, **config):
        settings = {"num_train_epochs": 1, "per_device_train_batch_size": 1, "train_sampling_strategy": "sequential"}
        names = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "logging_steps": 1}
        args = trl_jax.RewardConfig(str(tmp_path / "run"), save_steps=1, **(names | settings | config))
        return Overflows(str(checkpoint(**FACTS)), args, train_dataset=_table(rows))

    return build


def _table(rows):
    from datasets import Dataset

    return Dataset.from_list(rows)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_row10_weights_that_are_no_numbers(value, checkpoint, tmp_path):
    folder = copied(checkpoint("llama"), tmp_path)
    weight = np.ones((64, 96), np.float32)
    weight[3, 4] = value
    edit_tensors(folder, model__layers__1__mlp__down_proj__weight=weight)
    with pytest.raises(ValueError) as error:
        trainer(folder, tmp_path)
    assert str(error.value).startswith(f"{folder}: model.layers.1.mlp.down_proj.weight hold NaN or infinite values")
    assert "to train this one anyway, load it" in str(error.value)
    loaded = trl_jax.AutoModelForSequenceClassification.from_pretrained(folder)
    make(trl_jax, loaded, tmp_path / "all the same")


def test_row11_one_bad_step_is_logged_as_it_is_and_leaves_the_weights(run, tmp_path, caplog):
    trained = run([GOOD, BAD, GOOD])
    with caplog.at_level(logging.WARNING):
        trained.train()
    losses = [log["loss"] for log in trained.state.log_history if "loss" in log]
    assert np.isfinite([losses[0], losses[2]]).all() and losses[1] == np.inf
    assert "Step 2: loss inf, grad_norm" in caplog.text and "on rows 1 of train_dataset. The update was" in caplog.text
    weights = [(tmp_path / f"run/checkpoint-{n}/model.safetensors").read_bytes() for n in (1, 2, 3)]
    assert weights[0] == weights[1] != weights[2]


def test_row11_three_bad_steps_end_the_run_and_are_explained(run, tmp_path):
    trained = run([GOOD, GOOD, BAD, BAD, BAD, GOOD])
    with pytest.raises(FloatingPointError) as error:
        trained.train()
    text = str(error.value)
    assert text.startswith("Step 5: loss inf, grad_norm") and "on rows 4 of train_dataset." in text
    assert "Steps 3, 4, 5 in a row were not finite. The first one arises in exp (" in text
    assert "test_numbers.py:" in text and "(Overflows.loss)" in text and "It is computed from rows 4." in text
    assert "Their updates were skipped, so the weights and all checkpoints are finite." in text
    state = json.loads((tmp_path / "run/checkpoint-2/trainer_state.json").read_text())
    assert state["global_step"] == 2 and not (tmp_path / "run" / "checkpoint-5").exists()
    assert all(np.isfinite(array).all() for array in trained.model.params.values())


def test_row11_three_bad_steps_from_the_first_are_explained_though_checkpoints_are_written(run, tmp_path):
    with pytest.raises(FloatingPointError, match="^Step 3: loss inf, .* Steps 1, 2, 3 in a row were not finite"):
        run([BAD] * 4).train()
    # From the first checkpoint, when there is no finite loss to plot.
    card = (tmp_path / "run" / "README.md").read_text()
    assert "| save_steps | 1 |" in card and "training_loss.svg" not in card
    assert not (tmp_path / "run" / "training_loss.svg").exists()


def test_row11_the_layer_is_named(run):
    trained = run([GOOD])
    [path] = [path for path in trained.model.params if path.endswith("mlp.up.weight")]
    params = trained.model.params | {path: trained.model.params[path].at[0].set(3e38)}
    batch = next(iter(trained.loader(trained.train_dataset, training=True))).arrays
    found = nan_trace(lambda p: trained.loss(p, jax.tree.map(lambda leaf: leaf[0], batch), None), params)
    assert found.startswith("The first one arises in iteration 0 of 1 of a scan (over layers or blocks) in ")


def test_row11_bad_weights_never_become_a_checkpoint(run, tmp_path):
    trained = run([GOOD])
    path = next(iter(trained.model.params))
    trained.model.params[path] = trained.model.params[path].at[0].set(jnp.nan)
    from trl_jax.training.checkpoint_files import LoopProgress

    with pytest.raises(FloatingPointError, match=f"Step 0: {path} hold NaN or infinite values. No checkpoint was wri"):
        trained._save_progress(LoopProgress())
    assert not list((tmp_path / "run").glob("*checkpoint*"))


def test_row11_only_steps_in_a_row_count():
    def see(loss):
        metrics = {"loss": np.float32(loss), "grad_norm": np.float32(1), "updated": np.isfinite(loss)}
        guard.check(type("Batch", (), {"rows": [0]}), metrics)

    guard = NonFiniteGuard(1, lambda batch: "")
    for loss in (np.nan, np.nan, 1, np.nan, np.inf, 2, np.nan, np.nan):
        see(loss)
    with pytest.raises(FloatingPointError, match="^Step 9: loss nan, .* Steps 7, 8, 9 in a row"):
        see(np.nan)


@usual("config1-2")
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("config", [
    {"learning_rate": 1e30}, {"adam_epsilon": 0.0},
    {"optim": "schedule_free_adamw", "learning_rate": 1e30, "lr_scheduler_type": "constant"},
    {"optim": "schedule_free_adamw", "adam_epsilon": 0.0},
])  # fmt: skip
def test_row11_updates_that_are_not_finite_leave_the_weights_and_end_the_run(config, accumulation, run, caplog):
    trained = run([GOOD] * 4 * accumulation, gradient_accumulation_steps=accumulation, save_strategy="no", **config)
    before = jax.device_get(trained.model.params)
    with caplog.at_level(logging.WARNING), pytest.raises(FloatingPointError) as error:
        trained.train()
    assert all(np.array_equal(array, before[path]) for path, array in jax.device_get(trained.model.params).items())
    assert (
        ", update not finite, on rows 0" in caplog.text and "The update was skipped. After 3 such steps" in caplog.text
    )
    text = str(error.value)
    assert text.startswith("Step 3: loss ") and "Steps 1, 2, 3 in a row were not finite. The gradient is f" in text
    assert "or adam_epsilon lets it divide by zero. Their updates were skipped" in text


def test_row39_identical_pairs_are_counted(checkpoint, tmp_path, caplog):
    same = {"chosen_ids": [5, 6], "rejected_ids": [5, 6]}
    trainer(checkpoint("llama"), tmp_path, rows=[GOOD, same, GOOD, same])
    text = "2 of 4 rows of train_dataset have identical chosen and rejected tokens: no preference (first: row 1)"
    assert text in caplog.text


@pytest.mark.parametrize(("device", "extra"), [("GPU", "cuda"), ("TPU", "tpu")])
def test_row50_an_accelerator_that_lies_idle(device, extra, checkpoint, tmp_path, caplog, monkeypatch):
    there = {"GPU": "/dev/nvidia[0-9]*", "TPU": "/dev/accel[0-9]*"}[device]
    monkeypatch.setattr("glob.glob", lambda pattern: [pattern] if pattern == there else [])
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for use_cpu in (True, False):
        trainer(checkpoint("llama"), tmp_path, use_cpu=use_cpu)
    text = (
        f'Training on the CPU although this machine has a {device}. To use it, run pip install "trl_jax[{extra}]"; to'
    )
    assert caplog.text.count(text) == 1
