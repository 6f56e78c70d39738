"""Mutants: with one part broken at a time, the curve comparison that passes in test_curve must fail."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

from compat_tests.effort import only_thorough, usual
from compat_tests.parity.cases import CASES
from compat_tests.parity.marks import assert_same_curve
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.data import loader, packed
from trl_jax.hub import config
from trl_jax.losses.supervised import pairwise_loss
from trl_jax.nn.linear import Embedding
from trl_jax.trainer.reward_config import RewardConfig
from trl_jax.training.schedules import learning_rates

EPOCH_ORDER, PACK_EXAMPLES = loader.epoch_order, packed.pack_examples
SCALE_BY_ADAM, APPLY_UPDATES = optax.scale_by_adam, optax.apply_updates


def another_order(rows, *, seed, **how):
    return EPOCH_ORDER(rows, seed=seed + 1, **how)


def every_epoch_in_the_same_order(rows, *, epoch, **how):
    return EPOCH_ORDER(rows, epoch=0, **how)


def last_token_by_mask(ids, pad_token_id):
    return len(ids) - 1


def everything_decays(tensor):
    return True


def eps_inside_the_root(b1, b2, eps, *dtypes):
    return SCALE_BY_ADAM(b1=b1, b2=b2, eps=0.0, eps_root=eps)


def mean_over_rows(*args, **how):
    batch = PACK_EXAMPLES(*args, **how)
    return batch._replace(weight=(batch.weight > 0) / (batch.weight > 0).sum(dtype="float32"))


def loss_without_margin(*scores, margin, **how):
    return pairwise_loss(*scores, **how)


def loss_without_centring(*scores, center_rewards_coefficient, **how):
    return pairwise_loss(*scores, **how)


def float16_weights(params, updates):
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), APPLY_UPDATES(params, updates))
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded)


def warmup_one_step_early(name, **how):
    rate = learning_rates(name, **how)
    return lambda step: rate(step + 1)


def no_clipping(max_norm):
    return optax.identity()


class another_seed(TorchGenerator):
    def __init__(self, seed):
        super().__init__(seed + 1)


def pad_row_trains(num_embeddings, features, *, padding_idx=None, **axes):
    return Embedding(num_embeddings, features, **axes)


MUTANTS = [
    ("data_seed", "trl_jax.data.loader.epoch_order", another_order),
    ("data_seed", "trl_jax.data.loader.epoch_order", every_epoch_in_the_same_order),
    ("pad_is_eos", "trl_jax.data.batch.last_real_token", last_token_by_mask),
    ("pad_is_eos_chat", "trl_jax.models.decoder.Embedding", pad_row_trains),
    ("qwen2", "trl_jax.training.step.decays", everything_decays),
    ("plain", "trl_jax.training.optimizers.scale_by_adam", eps_inside_the_root),
    ("ragged_accumulation", "trl_jax.data.loader.pack_examples", mean_over_rows),
    ("margin", "trl_jax.tasks.reward.pairwise_loss", loss_without_margin),
    ("centered_hard", "trl_jax.tasks.reward.pairwise_loss", loss_without_centring),
    ("plain", "optax.apply_updates", float16_weights),
    ("cosine", "trl_jax.training.optimizer_choice.learning_rates", warmup_one_step_early),
    ("cosine", "trl_jax.training.optimizers.clip_by_global_norm", no_clipping),
    ("causal", "trl_jax.hub.checkpoint.TorchGenerator", another_seed),
]


# One mutant of the data, and the one with the smallest effect on the arithmetic.
@usual("eps_inside_the_root", "last_token_by_mask")
@pytest.mark.parametrize(("case", "place", "broken"), MUTANTS, ids=[broken.__name__ for *_, broken in MUTANTS])
def test_a_broken_part_is_noticed(runs, monkeypatch, case, place, broken):
    # The cached abstract model would still have the original part.
    monkeypatch.setattr(config, "_abstract", config._abstract.__wrapped__)
    monkeypatch.setattr(place, broken)
    assert_noticed(runs, case)


@only_thorough
def test_computing_in_bfloat16_is_noticed(runs, monkeypatch):
    monkeypatch.setattr(RewardConfig, "compute_dtype", "bfloat16")
    assert_noticed(runs, "plain")


def test_a_wrong_rate_is_noticed_even_where_the_log_tells_the_right_one(runs, monkeypatch):
    from trl_jax.training.optimizer_choice import LearningRate

    taken = LearningRate.take_next
    monkeypatch.setattr(LearningRate, "take_next", lambda self, groups: 0.99 * taken(self, groups))
    assert_noticed(runs, "plain", match="step 2, loss")


def assert_noticed(runs, case: str, match: str = "apart") -> None:
    """Assert that the curves differ by a number, not by their entries or keys."""
    logs = runs.ours_afresh(case).logs
    with pytest.raises(AssertionError, match=match):
        assert_same_curve(logs, runs.theirs(case).logs, **CASES[case].marks)
