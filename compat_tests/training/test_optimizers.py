"""Every optimizer against torch's, transformers' or its paper, step by step; adaptive schedules against
transformers'."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from compat_tests.training.test_torch_updates import DECAYED, STEPS, gradients, rate, start
from trl_jax.config.optimizers import OPTIMIZERS, parse_optim_args
from trl_jax.training.optimizers import Hyperparameters, from_optax, make_optimizer
from trl_jax.training.schedules import Greedy, Plateau


def ours(name, optim_args=None, **given):
    given = Hyperparameters(optim_args=parse_optim_args(name, optim_args), **given)
    tx = make_optimizer(name, given, decayed=DECAYED, max_grad_norm=None)
    params = {name: jnp.asarray(value) for name, value in start().items()}
    state = tx.init(params)
    for step in range(STEPS):
        grads = {name: jnp.asarray(value) for name, value in gradients(step).items()}
        updates, state = tx.update(grads, state, params, learning_rate=np.float32(rate(step)))
        params = optax.apply_updates(params, updates)
        yield params


def theirs(make, weight_decay=0.0):
    torch = pytest.importorskip("torch")
    params = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start().items()}
    groups = [
        {"params": [p for name, p in params.items() if DECAYED[name]], "weight_decay": weight_decay},
        {"params": [p for name, p in params.items() if not DECAYED[name]], "weight_decay": 0.0},
    ]
    optimizer = make(groups)
    for step in range(STEPS):
        for name, value in gradients(step).items():
            params[name].grad = torch.tensor(value)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        yield {name: p.detach().numpy().copy() for name, p in params.items()}


def same(ours, theirs):
    for step, (found, wanted) in enumerate(zip(ours, theirs, strict=True)):
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=f"step {step}, {name}")


def torch_class(name, **how):
    def make(groups):
        import torch

        return getattr(torch.optim, name)(groups, lr=0.0, **how)

    return make


def adafactor(groups):
    from transformers.optimization import Adafactor

    return Adafactor(groups, lr=0.0, scale_parameter=False, relative_step=False)


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize(
    ("name", "optim_args", "make"),
    [
        ("sgd", None, torch_class("SGD")),
        ("sgd", "momentum=0.9", torch_class("SGD", momentum=0.9)),
        ("sgd", "momentum=0.9, nesterov=True", torch_class("SGD", momentum=0.9, nesterov=True)),
        ("sgd", "momentum=0.8,dampening=0.5", torch_class("SGD", momentum=0.8, dampening=0.5)),
        ("adagrad", None, torch_class("Adagrad")),
        ("adagrad", "lr_decay=0.1,eps=1e-6", torch_class("Adagrad", lr_decay=0.1, eps=1e-6)),
        ("rmsprop", None, torch_class("RMSprop")),
        ("rmsprop", "alpha=0.9,momentum=0.5,eps=1e-4", torch_class("RMSprop", alpha=0.9, momentum=0.5, eps=1e-4)),
        ("adafactor", None, adafactor),
        ("paged_adamw_32bit", None, torch_class("AdamW")),
        ("adamw_anyprecision", "momentum_dtype=float32", torch_class("AdamW")),
    ],
)
def test_every_step_is_theirs(name, optim_args, make, decay):
    same(ours(name, optim_args, weight_decay=decay), theirs(make, decay))


def test_centered_rmsprop_is_torchs_where_it_is_well_conditioned():
    """While a gradient repeats, the variance is a difference of almost equal numbers; a large eps limits the effect."""
    make = torch_class("RMSprop", centered=True, eps=1e-2)
    same(ours("rmsprop", "centered=true,eps=1e-2"), theirs(make))


def by_the_paper(rule, weight_decay):
    params = {name: value.astype(np.float64) for name, value in start().items()}
    memory = {name: {} for name in params}
    for step in range(STEPS):
        for name, value in gradients(step).items():
            update = rule(value.astype(np.float64), memory[name], step + 1)
            params[name] -= rate(step) * (update + weight_decay * DECAYED[name] * params[name])
        yield params


def lion(g, memory, count):
    m = memory.get("m", 0.0)
    memory["m"] = 0.99 * m + 0.01 * g
    return np.sign(0.9 * m + 0.1 * g)


def ademamix(g, memory, count):
    b3 = np.exp(np.log(0.9) * np.log(0.999) / ((1 - count / 40) * np.log(0.999) + count / 40 * np.log(0.9)))
    for name, decay, value in (("m1", 0.9, g), ("m2", b3, g), ("nu", 0.99, g * g)):
        memory[name] = decay * memory.get(name, 0.0) + (1 - decay) * value
    alpha = min(4.0, 4.0 * count / 10)
    return (memory["m1"] / (1 - 0.9**count) + alpha * memory["m2"]) / (np.sqrt(memory["nu"] / (1 - 0.99**count)) + 1e-8)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_lion_is_its_papers(decay):
    same(ours("lion_32bit", b1=0.9, b2=0.99, weight_decay=decay), by_the_paper(lion, decay))


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_ademamix_is_its_papers(decay):
    text = "beta3=0.999,alpha=4,t_alpha=10,t_beta3=40"
    same(ours("ademamix", text, b2=0.99, weight_decay=decay), by_the_paper(ademamix, decay))


def test_the_8_bit_adam_keeps_its_first_moment_in_half_the_bytes():
    tx = make_optimizer("adamw_bnb_8bit", Hyperparameters(), decayed=DECAYED, max_grad_norm=None)
    params = {name: jnp.asarray(value) for name, value in start().items()}
    [adam] = [part for part in tx.init(params) if isinstance(part, optax.ScaleByAdamState)]
    assert {m.dtype for m in adam.mu.values()} == {jnp.dtype("bfloat16")}
    assert {v.dtype for v in adam.nu.values()} == {jnp.dtype("float32")}
    *_, found = ours("adamw_bnb_8bit")
    *_, exact = ours("adamw_torch")
    np.testing.assert_allclose(found["kernel"], exact["kernel"], atol=1e-3)
    assert np.any(found["kernel"] != exact["kernel"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_name_makes_steps_that_are_numbers(name):
    *_, last = ours(name, weight_decay=0.1)
    assert all(np.isfinite(value).all() for value in last.values())
    assert np.any(last["kernel"] != start()["kernel"])


def test_an_optax_transformation_is_scaled_by_the_schedules_share_of_its_peak():
    wanted = make_optimizer("adamw_torch", Hyperparameters(), decayed=DECAYED, max_grad_norm=0.5)
    given = from_optax(optax.adamw(3e-3, weight_decay=0.0), peak=1e-2, max_grad_norm=0.5)
    params = {name: jnp.asarray(value) for name, value in start().items()}
    a, b = wanted.init(params), given.init(params)
    for step in range(3):
        grads = {name: jnp.asarray(value) for name, value in gradients(step).items()}
        first, a = wanted.update(grads, a, params, learning_rate=3e-3 * 0.25)
        second, b = given.update(grads, b, params, learning_rate=1e-2 * 0.25)
        np.testing.assert_allclose(first["kernel"], second["kernel"], rtol=2e-3, atol=1e-8)


METRICS = [3.0, 2.0, 2.0, 1.9, 1.95, 1.95, 1.94, 1.93, 1.0, 0.9, 0.8, 0.7, 0.6, 0.65, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7] * 3


def rates_of(schedule, metrics):
    for metric in metrics:
        schedule.observe(metric)
        yield schedule(0)


def torchs_plateau(metrics, **how):
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **how)
    for metric in metrics:
        scheduler.step(metric)
        yield optimizer.param_groups[0]["lr"]


def transformers_greedy(metrics, **how):
    torch = pytest.importorskip("torch")
    from transformers.optimization import GreedyLR

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    scheduler = GreedyLR(optimizer, **how)
    for metric in metrics:
        scheduler.step(metric)
        yield optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    "how",
    [
        {"patience": 1},
        {"patience": 0, "factor": 0.5, "cooldown": 2, "min_lr": 1e-3},
        {"mode": "max", "patience": 2, "threshold": 0.3},
        {"mode": "max", "patience": 1, "threshold_mode": "abs", "threshold": 0.05},
        {"patience": 1, "threshold_mode": "abs", "threshold": 0.04},
        {"patience": 0, "factor": 0.9, "threshold": 1.5},  # the first evaluation is no progress, either
    ],
)
def test_a_plateau_is_torchs(how):
    wanted = list(torchs_plateau(METRICS, **how))
    assert list(rates_of(Plateau(1e-2, **how), METRICS)) == pytest.approx(wanted, abs=1e-14)


@pytest.mark.parametrize(
    "how",
    [
        {"patience": 1},
        {"patience": 0, "factor": 0.5, "cooldown": 2, "warmup": 1, "min_lr": 1e-3, "max_lr": 0.03},
        {"mode": "max", "patience": 1, "threshold_mode": "rel"},
        {"patience": 0, "factor": 0.3, "min_lr": 5e-3, "reset_start": 2},
        {"patience": 0, "smooth": True, "window_size": 3, "factor": 0.8, "min_lr": 8e-3, "reset_start": 1},
    ],
)
def test_greedy_is_transformers(how):
    ours = list(rates_of(Greedy(1e-2, **how), METRICS))
    assert ours == pytest.approx(list(transformers_greedy(METRICS, **how)), abs=1e-12)
    assert len(set(ours)) > 2


@pytest.mark.parametrize("kind", [Plateau, Greedy])
def test_a_schedule_that_follows_a_metric_goes_on_from_its_state(kind):
    whole = list(rates_of(kind(1e-2, patience=1), METRICS))
    first, second = kind(1e-2, patience=1), kind(1e-2, patience=1)
    list(rates_of(first, METRICS[:17]))
    second.restore(first.state())
    assert list(rates_of(second, METRICS[17:])) == whole[17:]


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("sgd", "weight_decay=0.1",
         "optim_args has the key 'weight_decay', but optim='sgd' takes momentum, dampening, nesterov; "
         "weight_decay is an argument of its own."),
        ("adamw_torch", "foo=1", "optim_args has the key 'foo', but optim='adamw_torch' takes no keys; leave it out."),
        ("sgd", "momentum", "optim_args must be KEY=VALUE pairs, got 'momentum': momentum has no value."),
        ("sgd", "momentum=much", "momentum of optim_args must be of type float, got 'much'."),
        ("sgd", "nesterov=true", "optim_args='nesterov=true': nesterov requires a momentum and no dampening."),
    ],
)  # fmt: skip
def test_optim_args_that_mean_nothing(name, text, error):
    with pytest.raises(ValueError) as caught:
        parse_optim_args(name, text)
    assert str(caught.value) == error
