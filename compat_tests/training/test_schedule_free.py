"""Schedule-free optimizers against the authors' package, optax, and the package's formulas in float64.

The package stores y and z and derives x; we store x and z.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from compat_tests.training.test_optimizers import ours, same
from compat_tests.training.test_torch_updates import DECAYED, STEPS, gradients, rate, start
from trl_jax.training.optimizers import Hyperparameters, make_optimizer, rectified
from trl_jax.training.update import make_step

CLASSES = {"adamw": "AdamWScheduleFree", "radam": "RAdamScheduleFree", "sgd": "SGDScheduleFree"}
SETTINGS = {
    "plain": {},
    "decay": {"weight_decay": 0.3},
    "warm": {"warmup_steps": 7, "weight_decay": 0.1},
    "weighted": {"r": 1.5, "weight_lr_power": 1.0, "warmup_steps": 3},
}
B1, B2, EPS = 0.9, 0.99, 1e-8


def found(kind, r=0.0, weight_lr_power=2.0, **given):
    return ours(f"schedule_free_{kind}", f"r={r},weight_lr_power={weight_lr_power}", b1=B1, b2=B2, eps=EPS, **given)


def packages(kind, weight_decay=0.0, **how):
    reason = "schedulefree, which TRL needs for these optimizers, is not installed"
    free, torch = pytest.importorskip("schedulefree", reason=reason), pytest.importorskip("torch")
    params = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start().items()}
    groups = [
        {"params": [p for name, p in params.items() if DECAYED[name] is decayed], "weight_decay": decay}
        for decayed, decay in ((True, weight_decay), (False, 0.0))
    ]
    adam = {} if kind == "sgd" else {"betas": (B1, B2), "eps": EPS}
    if kind == "radam":
        how.pop("warmup_steps", None)
    optimizer = getattr(free, CLASSES[kind])(groups, lr=0.0, **adam, **how)
    for step in range(STEPS):
        optimizer.train()
        for name, value in gradients(step).items():
            params[name].grad = torch.tensor(value)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.eval()
        yield {name: p.detach().numpy().copy() for name, p in params.items()}


def in_doubles(kind, weight_decay=0.0, warmup_steps=0, r=0.0, weight_lr_power=2.0):
    """y and z, in the package's notation."""
    y = {name: value.astype(np.float64) for name, value in start().items()}
    z, squares = dict(y), dict.fromkeys(y, 0.0)
    weights = highest = 0.0
    for step in range(STEPS):
        share = min((step + 1) / warmup_steps, 1.0) if warmup_steps else 1.0
        if kind == "radam":
            share = rectification(step + 1)
        lr = rate(step) * share
        highest = max(highest, lr)
        weight = (step + 1) ** r * highest**weight_lr_power
        weights += weight
        new = weight / weights if weights else 0.0
        for name, value in gradients(step).items():
            d = value.astype(np.float64)
            if kind != "sgd":
                squares[name] = B2 * squares[name] + (1 - B2) * d * d
                d = d / (np.sqrt(squares[name] / (1 - B2 ** (step + 1))) + EPS)
            d = d + weight_decay * DECAYED[name] * y[name]
            y[name] = (1 - new) * y[name] + new * z[name] + lr * (B1 * (1 - new) - 1) * d
            z[name] = z[name] - lr * d
        yield {name: (y[name] - (1 - B1) * z[name]) / B1 for name in y}


def rectification(step, b2=B2):
    longest = 2 / (1 - b2) - 1
    length = longest - 2 * step * b2**step / (1 - b2**step)
    if length <= 4:
        return 0.0
    return np.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", CLASSES)
def test_every_step_is_the_formulas(kind, settings):
    same(found(kind, **SETTINGS[settings]), in_doubles(kind, **SETTINGS[settings]))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", CLASSES)
def test_every_step_is_the_packages(kind, settings):
    wanted = list(packages(kind, **SETTINGS[settings]))  # raises a skip if it is not installed
    same(found(kind, **SETTINGS[settings]), wanted)


def test_every_step_is_optaxs():
    """At a constant rate, because optax's rate is a number or a function of the step."""

    def run(tx, x_of, **extra):
        params = {name: jnp.asarray(value) for name, value in start().items()}
        state = tx.init(params)
        for step in range(STEPS):
            grads = {name: jnp.asarray(value) for name, value in gradients(step).items()}
            updates, state = tx.update(grads, state, params, **extra)
            params = optax.apply_updates(params, updates)
            yield x_of(state, params)

    given = Hyperparameters(b1=B1, b2=B2, eps=EPS)
    tx = make_optimizer("schedule_free_adamw", given, decayed=DECAYED, max_grad_norm=None)
    theirs = optax.contrib.schedule_free_adamw(1e-3, b1=B1, b2=B2, eps=EPS)
    same(
        run(tx, lambda state, params: params, learning_rate=1e-3),
        run(theirs, optax.contrib.schedule_free_eval_params),
    )


def test_the_rectification_has_its_digits():
    """Also for steps beyond the table, and for a decay where large numbers cancel."""
    share = jax.jit(rectified(0.999))
    for step in (1, 5, 6, 7, 40, 999, 4096, 4097, 20_000):
        assert float(share(jnp.asarray(step - 1))) == pytest.approx(rectification(step, 0.999), rel=1e-5), step


def test_a_step_takes_its_gradient_between_the_two():
    tx = make_optimizer("schedule_free_sgd", Hyperparameters(), decayed={"w": True}, max_grad_norm=None)
    seen = []

    def loss(params, batch, key):
        jax.debug.callback(lambda w: seen.append(float(w)), params["w"])
        return jnp.sum(params["w"] ** 2) / 2 + 0 * jnp.sum(batch), {}

    step, params = make_step(loss, tx), {"w": jnp.asarray(1.0)}
    state, x, z, weights = tx.init(params), 1.0, 1.0, 0
    for count in range(4):
        params, state, _ = step(params, state, jnp.zeros((1, 1)), np.float32(0.5), None)
        y = 0.9 * x + 0.1 * z
        z, weights = z - 0.5 * y, weights + 1
        x = x + (z - x) / weights
        jax.effects_barrier()
        assert seen[count] == pytest.approx(y, rel=1e-6) and float(params["w"]) == pytest.approx(x, rel=1e-6)
