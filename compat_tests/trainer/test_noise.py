"""`neftune_noise_alpha` in a run."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trl_jax
from compat_tests.trainer.trainers import FACTS, make
from trl_jax.trainer.chance import chances, check_noise, run_key


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**FACTS)


def losses(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


class Own(trl_jax.RewardTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs)


def test_training_has_noise_and_evaluation_has_none(folder, tmp_path):
    """Nor do the two ways to a step differ in anything else."""

    def trained(package, **config):
        trainer = make(package, folder, tmp_path, config={"max_steps": 1, "logging_steps": 1} | config)
        trainer.train()
        return losses(trainer), trainer

    own = SimpleNamespace(RewardConfig=trl_jax.RewardConfig, RewardTrainer=Own)
    calm, trainer = trained(trl_jax)
    noisy = trained(trl_jax, neftune_noise_alpha=20.0)[0]
    owns = trained(own, neftune_noise_alpha=20.0)[0]
    assert abs(noisy[0] - calm[0]) > 1e-5 and abs(owns[0] - calm[0]) > 1e-5
    before = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    trainer.args.neftune_noise_alpha = 20.0
    after = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    assert after == pytest.approx(before, rel=1e-6)  # rows are padded now


def asked(**how):
    return SimpleNamespace(**({"disable_dropout": True, "neftune_noise_alpha": None, "seed": 1} | how))


def test_what_is_left_to_chance():
    lengths, key = jnp.asarray([3, 9]), jax.random.key(0)
    assert run_key(asked()) is None and chances(asked(), None, lengths, None) == {}
    assert run_key(asked(neftune_noise_alpha=0.0)) is None
    assert run_key(asked(neftune_noise_alpha=1.0)) is not None
    assert list(chances(asked(disable_dropout=False), key, lengths, None)) == ["dropout_key"]
    both = chances(asked(disable_dropout=False, neftune_noise_alpha=5.0), key, lengths, None)
    assert both["dropout_key"] is key and not np.array_equal(*map(jax.random.key_data, (both["noise"].key, key)))
    alone = [chances(asked(neftune_noise_alpha=5.0), key, lengths, multiple) for multiple in (None, "auto", 8)]
    assert [int(how["noise"].length) for how in alone] == [9, 9, 16]
    assert all(list(how) == ["noise"] for how in alone)


def test_an_exported_program_takes_none():
    engine = SimpleNamespace(takes_noise=False, name="exported")
    check_noise(asked(), engine)
    with pytest.raises(ValueError, match="neftune_noise_alpha=5.0: this model runs on the exported engine, whose"):
        check_noise(asked(neftune_noise_alpha=5.0), engine)
