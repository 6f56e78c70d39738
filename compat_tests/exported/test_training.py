"""Ten steps of TRL and of ours for exported model types: every logged number, every weight."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from compat_tests.effort import only_thorough
from compat_tests.parity import reference
from compat_tests.parity.marks import assert_same_curve, assert_same_weights
from compat_tests.tiny import preference_rows

pytest.importorskip("trl")

# Centering gives a gradient to parameters that cancel in the difference of scores, such as the last norm's bias.
CONFIG = {"center_rewards_coefficient": 0.1, "weight_decay": 0.3, "learning_rate": 1e-3}
CASES = {
    "gpt_neo": {},  # learned positions, local attention; layer norms named ln_1
}


@pytest.fixture(scope="module")
def runs(trainable, tmp_path_factory):
    """runs(model_type) -> (our run, TRL's run), trained once."""
    done = {}

    def train(model_type):
        if model_type not in done:
            folder, out = trainable(model_type, **CASES[model_type]), tmp_path_factory.mktemp("runs")
            done[model_type] = (
                reference.run_ours(folder, preference_rows(40), out / "ours", **CONFIG),
                reference.run_trl(folder, preference_rows(40), out / "theirs", **CONFIG),
            )
        return done[model_type]

    return train


@only_thorough
@pytest.mark.parametrize("model_type", CASES)
def test_ten_steps_are_trls(model_type, runs):
    ours, theirs = runs(model_type)
    assert theirs.logs[-1]["step"] == 10
    assert_same_curve(ours.logs, theirs.logs)
    assert_same_weights(ours.weights, theirs.weights)


@pytest.mark.parametrize("model_type", CASES)
def test_what_is_saved_is_what_trl_saves(model_type, runs, trainable):
    """The same config; and weights moved much further than the tolerance, or an idle optimizer would pass."""
    ours, theirs = runs(model_type)
    mine, other = (json.loads((run.folder / "config.json").read_text()) for run in (ours, theirs))
    assert mine == other
    before = reference.read_weights(trainable(model_type, **CASES[model_type]))
    prefix = "" if set(before) <= set(theirs.weights) else "model."  # the trunk alone has no prefix
    moved = [np.abs(theirs.weights[prefix + name] - tensor).max() for name, tensor in before.items()]
    assert max(moved) > 10 * 2e-4


@only_thorough
def test_the_log_names_the_engine_and_the_best_model_comes_back(trainable, tmp_path, caplog):
    from datasets import Dataset

    from trl_jax.trainer.reward_config import RewardConfig
    from trl_jax.trainer.reward_trainer import RewardTrainer

    rows = Dataset.from_list(preference_rows(16))
    args = RewardConfig(
        str(tmp_path), **reference.BASE | {"save_strategy": "steps", "save_steps": 2, "max_steps": 4},
        eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, metric_for_best_model="loss",
        greater_is_better=True,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "trl_jax"):
        trainer = RewardTrainer(str(trainable("gpt_neo")), args, train_dataset=rows, eval_dataset=rows)
    [line] = [record.getMessage() for record in caplog.records if "backend" in record.getMessage()]
    name = "exported (model_type 'gpt_neo', transformers' code by way of torch.export)"
    assert line.endswith(f"runs on the {name} backend.")
    trainer.train()
    told = [one for one in caplog.messages if "torch exports transformers' code for" in one]
    assert told and "takes tens of seconds" in told[0]
    best = reference.read_weights(trainer.state.best_model_checkpoint)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    for name, tensor in best.items():
        np.testing.assert_array_equal(trainer.model.params[name], tensor, err_msg=name)
    again = RewardTrainer(trainer.model, args, train_dataset=rows, eval_dataset=rows)
    assert again.evaluate()["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], abs=1e-6)
