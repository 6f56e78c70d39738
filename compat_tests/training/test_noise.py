"""Randomness in training: `neftune_noise_alpha`, and routers that sample experts."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.effort import only_thorough, thorough
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.reference import BASE
from compat_tests.tiny import text_rows
from compat_tests.trainer.trainers import FACTS, make, table
from trl_jax.core.outputs import VirtualTokens
from trl_jax.nn.linear import Stream, stream_keys
from trl_jax.training.forward import check_noise, random_options, run_key
from trl_jax.training.user_loss_model import ScoreModel


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**FACTS)


def test_training_has_noise_and_evaluation_has_none(folder, tmp_path):
    """The set is a single batch: without noise both losses would be equal."""
    rows, config = table(4), {"max_steps": 1, "logging_steps": 1}
    trainer = make(trl_jax, folder, tmp_path, train=rows, config=config | {"neftune_noise_alpha": 20.0})
    calm = make(trl_jax, folder, tmp_path, config=config).evaluate(rows)["eval_loss"]
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(calm, rel=1e-6)
    trainer.train()
    assert abs(trainer.state.log_history[0]["loss"] - calm) > 1e-3


@only_thorough
@pytest.mark.parametrize("layout", ["auto", thorough("padded")])
def test_routers_draw_in_training_and_not_in_evaluation(layout, checkpoint, tmp_path):
    """Even though `disable_dropout` is True, the default of this trainer."""
    folder, rows = checkpoint("phimoe", router_jitter_noise=0.4, **FACTS), table(4)
    config = {"max_steps": 1, "logging_steps": 1, "batch_layout": layout}
    trainer = make(trl_jax, folder, tmp_path, train=rows, config=config)
    assert trainer.args.disable_dropout
    calm = trainer.evaluate(rows)["eval_loss"]
    assert trainer.evaluate(rows)["eval_loss"] == calm
    losses = []
    for seed in (1, 1, 2):
        trainer = make(trl_jax, folder, tmp_path, train=rows, config=config | {"seed": seed, "data_seed": 0})
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == losses[1] and abs(losses[0] - losses[2]) > 1e-4 and abs(losses[0] - calm) > 1e-4


@only_thorough
def test_a_scripts_own_loss_has_noise_too(folder, tmp_path):
    trainer = make(trl_jax, folder, tmp_path, config={"neftune_noise_alpha": 20.0})
    ids = np.asarray([[5, 6, 7, 8], [9, 10, 11, 12]])

    def scores(**how):
        bound = ScoreModel(trainer.model, trainer.model.params, dtype="float32", **how)
        return np.asarray(bound(input_ids=ids).logits)

    options = trainer.parts.forward.random_options
    noisy = scores(random_options=lambda call, lengths: options(jax.random.key(call), lengths))
    assert np.abs(noisy - scores()).min() > 1e-3


def asked(**how):
    return SimpleNamespace(**({"disable_dropout": True, "neftune_noise_alpha": None, "seed": 1} | how))


CALM, DRAWS = (
    SimpleNamespace(traits=SimpleNamespace(draws_experts=draws), virtual=VirtualTokens()) for draws in (False, True)
)


def options(backend, key, multiple=None, *, lengths=(3, 9), concatenated=None, **how):
    return random_options(asked(**how), backend, key, jnp.asarray(lengths), multiple, concatenated)


def test_what_is_left_to_chance():
    key = jax.random.key(0)
    assert run_key(asked(), CALM) is None and options(CALM, None) == {}
    assert run_key(asked(neftune_noise_alpha=0.0), CALM) is None
    assert run_key(asked(neftune_noise_alpha=1.0), CALM) is not None
    assert list(options(CALM, key, disable_dropout=False)) == ["dropout_key"]
    both = options(CALM, key, disable_dropout=False, neftune_noise_alpha=5.0)
    assert both["dropout_key"] is key and not np.array_equal(*map(jax.random.key_data, (both["noise"].key, key)))
    alone = [options(CALM, key, multiple, neftune_noise_alpha=5.0) for multiple in (None, "auto", 8)]
    assert [int(how["noise"].length) for how in alone] == [9, 9, 16]
    assert all(list(how) == ["noise"] for how in alone)


def test_texts_that_trl_concatenates_have_the_noise_of_one_text():
    """transformers' hook divides by the square root of the embedding's shape, [1, 12, D] for texts of 3 and 9 tokens.
    Each device has its own micro-batch."""
    key, noisy = jax.random.key(0), {"neftune_noise_alpha": 5.0}
    lengths = [
        options(CALM, key, multiple, concatenated=devices, **noisy)["noise"].length
        for multiple, devices in ((None, 1), (8, 1), (None, 2))
    ]
    assert list(map(int, lengths)) == [12, 16, 6]


def test_the_last_step_of_an_epoch_has_noise_too(checkpoint, tmp_path):
    """Two of its micro-batches are empty. The gradient was NaN, and the update was skipped."""
    config = {"max_steps": 2, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 1}
    args = trl_jax.SFTConfig(str(tmp_path), **BASE | config | {"neftune_noise_alpha": 5.0})
    trainer = trl_jax.SFTTrainer(str(checkpoint(**SMALL)), args, train_dataset=Dataset.from_list(text_rows(4)))
    trainer.train()
    assert np.isfinite([log["grad_norm"] for log in trainer.state.log_history[:2]]).all()


def test_routers_draw_without_dropout_too():
    """transformers' routers do so whenever the model is in training mode."""
    key = run_key(asked(), DRAWS)
    assert list(options(DRAWS, key)) == ["router_key"]
    every = options(DRAWS, key, disable_dropout=False, neftune_noise_alpha=5.0)
    assert list(every) == ["dropout_key", "router_key", "noise"]
    [dropout], [router] = (
        stream_keys(every[name], stream, 1)
        for name, stream in (("dropout_key", Stream.LAYERS), ("router_key", Stream.ROUTERS))
    )
    keys = {tuple(jax.random.key_data(one).tolist()) for one in (dropout, router, every["noise"].key)}
    assert len(keys) == 3


def test_an_exported_program_takes_none():
    backend = SimpleNamespace(traits=SimpleNamespace(takes_noise=False), name="exported")
    check_noise(asked(), backend)
    with pytest.raises(ValueError, match="neftune_noise_alpha=5.0: this model runs on the exported backend, whose"):
        check_noise(asked(neftune_noise_alpha=5.0), backend)
