"""The step: donates its inputs, compiles once per shape, and does not depend on how micro-batches are grouped."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from compat_tests.effort import thorough
from trl_jax.config.optimizers import parse_optim_args
from trl_jax.training.optimizers import Hyperparameters, from_optax, make_optimizer
from trl_jax.training.step import optimizer_of
from trl_jax.training.update import make_step

RATE = np.float32(0.1)


def loss(params, batch, key):
    """Weighted squared error of a linear map; the weights of a step sum to one."""
    errors = batch["x"] @ params["w"] - batch["y"]
    noise = jnp.zeros(()) if key is None else jax.random.normal(key)
    total = jnp.sum(batch["weight"] * jnp.square(errors))
    return total + 0 * noise, {
        "rows": jnp.sum(batch["weight"] > 0),
        "largest": jnp.max(errors),
        "noise": noise,
    }


def optimizer(name="adamw_torch", optim_args="", max_grad_norm=None, **hyper):
    hyper = Hyperparameters(optim_args=parse_optim_args(name, optim_args), **hyper)
    return make_optimizer(name, hyper, decayed={"w": True}, max_grad_norm=max_grad_norm)


def params():
    return {"w": jnp.asarray([0.5, -1.0, 2.0])}


def batch(micro_batches: int, rows: int, seed: int = 0, weight: float | None = None) -> dict[str, np.ndarray]:
    dice = np.random.default_rng(seed)
    count = micro_batches * rows
    return {
        "x": dice.standard_normal((micro_batches, rows, 3)).astype(np.float32),
        "y": dice.standard_normal((micro_batches, rows)).astype(np.float32),
        "weight": np.full((micro_batches, rows), 1 / count if weight is None else weight, np.float32),
    }


def take(step, batch, key=None):
    """One step from the initial state: (params, metrics) as NumPy."""
    start = params()
    moved, _, metrics = step(start, optimizer().init(start), batch, RATE, key)
    return jax.device_get((moved, metrics))


@pytest.fixture
def step():
    return make_step(loss, optimizer())


def test_params_and_optimizer_state_are_donated(step):
    start = params()
    state = optimizer().init(start)
    moved, after, _ = step(start, state, batch(2, 4), RATE, None)
    assert start["w"].is_deleted() and not moved["w"].is_deleted()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state) if leaf.ndim)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(start["w"])
    step(moved, after, batch(2, 4), RATE, None)


@pytest.mark.parametrize("micro_batches", [2, 3, 6])
def test_accumulation_is_one_big_batch(step, micro_batches):
    whole = batch(1, 12)
    parts = {name: value.reshape(micro_batches, -1, *value.shape[2:]) for name, value in whole.items()}
    (one, of_one), (many, of_many) = take(step, whole), take(step, parts)
    np.testing.assert_allclose(many["w"], one["w"], rtol=1e-6)
    np.testing.assert_allclose(of_many["loss"], of_one["loss"], rtol=1e-6)
    np.testing.assert_allclose(of_many["grad_norm"], of_one["grad_norm"], rtol=1e-6)


def test_metrics_have_a_row_a_micro_batch(step):
    for count in (1, 3):
        given = batch(count, 4)
        _, metrics = take(step, given)
        assert {name: value.shape for name, value in metrics.items()} == {
            "rows": (count,), "largest": (count,), "noise": (count,), "loss": (), "grad_norm": (), "updated": (),
        }  # fmt: skip
        errors = given["x"] @ np.asarray(params()["w"]) - given["y"]
        np.testing.assert_allclose(metrics["largest"], errors.max(axis=1), rtol=1e-5)
        np.testing.assert_allclose(metrics["loss"], np.mean(errors**2), rtol=1e-5)


def test_filled_micro_batches_change_nothing(step):
    full = batch(2, 4)
    noise = batch(1, 4, seed=5, weight=0.0)
    filled = {name: np.concatenate([full[name], noise[name]]) for name in full}
    (short, of_short), (long, of_long) = take(step, full), take(step, filled)
    np.testing.assert_array_equal(long["w"], short["w"])
    assert of_long["loss"] == of_short["loss"] and of_long["grad_norm"] == of_short["grad_norm"]
    np.testing.assert_array_equal(of_long["rows"], [4, 4, 0])


def test_grad_norm_is_taken_before_clipping():
    tx = optimizer(max_grad_norm=1e-3)
    given = batch(1, 4)
    start = params()
    _, _, metrics = make_step(loss, tx)(start, tx.init(start), given, RATE, None)
    one = jax.tree.map(lambda leaf: leaf[0], given)
    wanted = optax.global_norm(jax.grad(lambda p: loss(p, one, None)[0])(params()))
    np.testing.assert_allclose(metrics["grad_norm"], wanted, rtol=1e-6)
    assert metrics["grad_norm"] > 1e-2


def test_the_rate_is_given_with_each_step(step):
    start = params()
    still, _, _ = step(start, optimizer().init(start), batch(1, 4), np.float32(0.0), None)
    np.testing.assert_array_equal(still["w"], params()["w"])


def test_one_compilation_a_shape(step):
    start = params()
    state = optimizer().init(start)
    for seed, rate in enumerate((0.1, 0.2, 0.3)):
        start, state, _ = step(start, state, batch(2, 4, seed=seed), np.float32(rate), None)
    assert step._cache_size() == 1
    start, state, _ = step(start, state, batch(2, 5), RATE, None)
    step(start, state, batch(2, 4), RATE, None)
    assert step._cache_size() == 2


def test_micro_batches_draw_different_numbers_and_the_key_decides_which(step):
    _, first = take(step, batch(3, 4), jax.random.key(1))
    _, again = take(step, batch(3, 4), jax.random.key(1))
    _, other = take(step, batch(3, 4), jax.random.key(2))
    np.testing.assert_array_equal(first["noise"], again["noise"])
    assert len(set(first["noise"].tolist()) | set(other["noise"].tolist())) == 6


def test_what_is_frozen_stays_and_has_no_moments(step):
    """params are updated as without it; frozen arrays are neither donated nor returned."""

    def shifted(params, batch, key):
        return loss({"w": params["w"] + params["base"]}, batch, key)

    base, small = jnp.asarray([0.25, 0.5, -1.0]), {"w": params()["w"] - jnp.asarray([0.25, 0.5, -1.0])}
    apart = make_step(shifted, optimizer())
    state = optimizer().init(small)
    moved, state, metrics = apart(small, state, batch(2, 2), RATE, None, {"base": base})
    alone, expected = take(step, batch(2, 2))
    assert set(moved) == {"w"} and len(jax.tree.leaves(state)) == len(jax.tree.leaves(optimizer().init(moved)))
    assert np.allclose(moved["w"] + base, alone["w"], atol=1e-6) and not base.is_deleted()
    assert np.allclose(metrics["grad_norm"], expected["grad_norm"], rtol=1e-5)


# Gradients are finite, and one of them is 0; the update is not finite, or its square overflows.
POISON = {
    "rate": (optimizer(), 1e30),
    "infinite rate": (optimizer(), np.inf),
    "epsilon": (optimizer(eps=0.0), 0.1),
    "beta2": (optimizer(b2=1.0), 0.1),
    "sgd, rate": (optimizer("sgd"), 1e30),
    "rmsprop, epsilon": (optimizer("rmsprop", "eps=0.0"), 0.1),
    "ademamix, epsilon": (optimizer("ademamix", eps=0.0), 0.1),
    "schedule-free, rate": (optimizer("schedule_free_adamw"), 1e30),
    "schedule-free, epsilon": (optimizer("schedule_free_adamw", eps=0.0), 0.1),
    "schedule-free, beta2": (optimizer("schedule_free_radam", b2=1.0 - 2**-53, eps=0.0), 0.1),
    "schedule-free sgd, rate": (optimizer("schedule_free_sgd"), 1e30),
    "of a user": (from_optax(optax.adam(1e-3, eps=0.0), peak=1e-3, max_grad_norm=None), 0.1),
}


@pytest.mark.parametrize("micro_batches", [thorough(1), 3])
@pytest.mark.parametrize("case", POISON)
def test_an_update_that_is_not_finite_is_left_out(case, micro_batches):
    tx, rate = POISON[case]
    given = batch(micro_batches, 4)
    given["x"][..., 2] = 0.0
    before = jax.device_get((params(), tx.init(params())))
    start = params()
    moved, state, metrics = make_step(loss, tx)(start, tx.init(start), given, np.float32(rate), None)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((moved, state)), before)
    assert not metrics["updated"] and np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"])


@pytest.mark.parametrize("name", ["adamw_torch", "sgd", "schedule_free_adamw"])
def test_steps_go_on_behind_one_that_was_left_out(name):
    tx = optimizer(name)
    step, found = make_step(loss, tx), []
    for rates in ((0.1, 0.1), (0.1, 1e30, 0.1)):
        moved, state = params(), tx.init(params())
        for rate in rates:
            moved, state, metrics = step(moved, state, batch(2, 4), np.float32(rate), None)
            assert bool(metrics["updated"]) is (rate < 1)
        found.append(jax.device_get((moved, state)))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("name", ["adamw_torch", "adafactor", "lion_32bit"])
def test_the_check_of_an_update_changes_no_digit(name):
    tx, found = optimizer(name, weight_decay=0.1, max_grad_norm=1.0), []
    for safe_rate in (None, 1.0):
        step, moved, state = make_step(loss, tx._replace(safe_rate=safe_rate)), params(), tx.init(params())
        for seed in range(4):
            moved, state, _ = step(moved, state, batch(2, 4, seed=seed), RATE, None)
        found.append(jax.device_get((moved, state)))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("name, hyper, safe", [
    ("adamw_torch", {}, True), ("adamw_bnb_8bit", {}, True), ("adamw_torch", {"eps": 0.0}, False),
    ("adamw_torch", {"b1": 1.0}, False), ("adamw_torch", {"b2": 1.0}, False), ("rmsprop", {}, False),
])  # fmt: skip
def test_only_adam_with_sound_settings_needs_no_check(name, hyper, safe):
    assert (optimizer(name, **hyper).safe_rate is not None) is safe


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA for other devices counts otherwise")
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_moments_are_updated_in_place(eps):
    """Besides its arguments, a step needs memory for the gradient (here as large as the weights) but not for a second
    copy of the moments; checking the update needs one byte per number."""
    tx = optimizer(eps=eps, weight_decay=0.1, max_grad_norm=1.0)
    size = 512

    def of_many(params, batch, key):
        return jnp.sum(jnp.tanh(batch["x"] @ params["w"])), {}

    start = {"w": jnp.ones((size, size))}
    many = {"x": np.ones((1, 4, size), np.float32)}
    step = make_step(of_many, tx).lower(start, tx.init(start), many, RATE, None).compile()
    assert step.memory_analysis().temp_size_in_bytes < 1.5 * start["w"].nbytes


class Seen(NamedTuple):
    """A batch: the weight of the tower's output in each micro-batch, and whether there are images."""

    weight: Any
    images: Any


@pytest.mark.parametrize("name", ["adamw_torch", "schedule_free_adamw"])
def test_a_tower_rests_in_steps_without_images_only(name):
    """In torch, a tower that took part in a step moves by its moments and decays, even if its gradients are all 0 (all
    rewards are equal); one that took no part has no gradients. schedulefree counts steps for all parameters. `limit` is
    a buffer."""
    torch = pytest.importorskip("torch")
    steps = [(1.0, True), (None, False), (0.0, True), (2.0, True), (None, False), (-1.0, True)]
    start = {"text": np.float32([0.5, -1.0]), "tower": np.float32([1.5, 2.0]), "limit": np.float32([1.0])}

    theirs = {key: torch.nn.Parameter(torch.tensor(value)) for key, value in start.items() if key != "limit"}
    if name == "adamw_torch":
        torchs = torch.optim.AdamW(theirs.values(), lr=0.1, weight_decay=0.3)
    else:
        free = pytest.importorskip("schedulefree", reason="TRL needs schedulefree for this optimizer")
        torchs = free.AdamWScheduleFree(theirs.values(), lr=0.1, weight_decay=0.3)
        torchs.train()
    for weight, _ in steps:
        torchs.zero_grad()
        total = theirs["text"].square().sum()
        (total if weight is None else total + weight * theirs["tower"].square().sum()).backward()
        torchs.step()
    if name != "adamw_torch":
        torchs.eval()

    def seen_loss(params, batch, key):
        total = jnp.square(params["text"]).sum()
        if batch.images is not None:
            total += batch.weight * jnp.square(params["tower"]).sum()
        return total + 0 * params["limit"].sum(), {}

    made = make_optimizer(
        name, Hyperparameters(weight_decay=0.3), decayed=dict.fromkeys(start, True), max_grad_norm=None
    )
    tx = optimizer_of(made, None, None, {"limit": np.zeros((), bool)}, frozenset({"tower", "limit"}))
    step, params = make_step(seen_loss, tx), jax.tree.map(jnp.asarray, start)
    state = tx.init(params)
    for weight, images in steps:
        batch = Seen(np.float32([weight or 0.0]), np.zeros(1) if images else None)
        params, state, _ = step(params, state, batch, RATE, None)
    for key, value in theirs.items():
        np.testing.assert_allclose(params[key], value.detach().numpy(), rtol=2e-6, err_msg=key)
    assert params["limit"] == 1
