"""Trainers share a jitted step only if everything it is traced from is equal."""

from __future__ import annotations

import pytest
from datasets import Dataset

import trl_jax
from compat_tests.effort import THOROUGH
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.grpo_cases import length_reward, prompt_rows
from compat_tests.parity.reference import BASE
from compat_tests.trainer.trainers import FACTS, make, table
from trl_jax.hub import push
from trl_jax.losses import supervised

pytestmark = pytest.mark.skipif(THOROUGH, reason="nothing is shared under THOROUGH=1")


@pytest.fixture
def programs(checkpoint, tmp_path):
    """programs(package, config, facts) -> the jitted step and evaluation of a trainer."""

    def of(package=trl_jax, facts=None, **config):
        config = {"center_rewards_coefficient": 0.01} | config
        trainer = make(package, checkpoint(**FACTS | (facts or {})), tmp_path, config=config)
        step = trainer.parts.train_step.compiled(trainer.parts.training.build_optimizer(), remat=False)
        return step, trainer.parts.evaluator._outputs

    return of


def test_what_only_the_host_reads_makes_no_difference(programs):
    one = programs()
    assert programs(max_steps=3, logging_steps=2, seed=5, per_device_train_batch_size=2, learning_rate=0.1) == one
    assert programs(max_length=48, do_eval=True) == one
    assert all(mine is other for mine, other in zip(programs(), one, strict=True))


@pytest.mark.parametrize("changed", [
    {"center_rewards_coefficient": 0.5}, {"weight_decay": 0.1}, {"optim": "sgd"}, {"max_grad_norm": 0.5},
    {"adam_beta1": 0.8}, {"facts": {"hidden_size": 16}}, {"facts": {"num_key_value_heads": 2}}, {"bf16": True},
    {"neftune_noise_alpha": 5.0}, {"disable_dropout": False},
], ids=str)  # fmt: skip
def test_a_step_of_something_else_is_another(changed, programs):
    assert programs(**changed)[0] is not programs()[0]


def test_a_class_of_a_script_has_its_own(programs):
    class Own(trl_jax.RewardTrainer):
        def loss(self, params, batch, key, **how):
            return super().loss(params, batch, key, **how)

    class Package:
        RewardConfig, RewardTrainer = trl_jax.RewardConfig, Own

    assert programs(Package)[0] is not programs()[0] and programs(Package)[0] is programs(Package)[0]
    assert programs(Package, learning_rate=0.1)[0] is not programs(Package)[0]  # its loss may read it


def test_the_length_of_texts_counts_where_attention_has_windows(programs):
    facts = {"model_type": "mistral", "sliding_window": 8}
    assert programs(facts=facts, max_length=48)[0] is not programs(facts=facts, max_length=32)[0]


def test_nothing_is_shared_while_something_is_patched(programs, monkeypatch):
    before = programs()
    monkeypatch.setattr(supervised, "pairwise_loss", None)
    assert programs()[0] is not before[0]
    monkeypatch.undo()
    assert programs()[0] is before[0]


def test_steps_are_shared_while_something_is_patched_that_only_the_host_goes_through(programs, monkeypatch):
    before = programs()
    monkeypatch.setattr(push, "_WAITS", (0.0,))
    assert programs() == before


def test_an_optimizer_of_the_script_is_its_own(checkpoint, tmp_path):
    import optax

    def step():
        trainer = make(trl_jax, checkpoint(**FACTS), tmp_path, train=table(16), optimizers=(optax.sgd(1e-3), None))
        return trainer.parts.train_step.compiled(trainer.parts.training.build_optimizer(), remat=False)

    assert step() is not step()


def test_policies_share_programs_of_their_completions_too(checkpoint, tmp_path):
    def programs(**config):
        args = trl_jax.GRPOConfig(str(tmp_path), **BASE | {"num_generations": 4} | config)
        trainer = trl_jax.GRPOTrainer(str(checkpoint(**SMALL)), length_reward, args, Dataset.from_list(prompt_rows(8)))
        parts = trainer.parts
        step = parts.train_step.compiled(parts.training.build_optimizer(), remat=False)
        return step, parts.evaluator.sums

    one, same, another = programs(), programs(max_steps=3, num_iterations=2, top_k=5), programs(epsilon=0.1)
    assert all(mine is other for mine, other in zip(one, same, strict=True))
    assert not any(mine is other for mine, other in zip(one, another, strict=True))
