"""Learning rates against transformers' schedulers, at every step of a run."""

from __future__ import annotations

import inspect

import pytest

from trl_jax.config.optimizers import ADAPTIVE, SCHEDULES
from trl_jax.training import schedules
from trl_jax.training.schedules import ADAPTIVE as FOLLOWING
from trl_jax.training.schedules import learning_rates

PEAK = 3e-4
NEEDY = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay")  # they have required arguments


def theirs(name, warmup_steps, max_steps, kwargs):
    torch = pytest.importorskip("torch")
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(name, optimizer, warmup_steps, max_steps, scheduler_specific_kwargs=kwargs)
    rates = []
    for _ in range(max_steps + 3):  # slightly beyond the end, where rates must not rise again
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup_steps, max_steps", [(0, 40), (1, 40), (7, 40), (40, 40), (50, 40), (0, 1)])
@pytest.mark.parametrize(
    "name, kwargs",
    [
        *((name, {}) for name in SCHEDULES if name not in (*ADAPTIVE, *NEEDY)),
        ("cosine", {"num_cycles": 1.25}),
        ("cosine", {"num_cycles": 2}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("polynomial", {"power": 2.5, "lr_end": 1e-6}),
        ("inverse_sqrt", {"timescale": 30}),
        ("cosine_with_min_lr", {"min_lr": 1e-5}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.2, "num_cycles": 1.5}),
        ("cosine_warmup_with_min_lr", {"min_lr": 1e-5}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2, "warmup_lr_rate": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 10}),
        ("warmup_stable_decay", {"num_decay_steps": 10, "num_stable_steps": 5, "min_lr_ratio": 0.1, "num_cycles": 1}),
        *(
            ("warmup_stable_decay", {"num_decay_steps": 8, "min_lr_ratio": 0.1, "warmup_type": how, "decay_type": how})
            for how in ("linear", "cosine", "1-sqrt")
        ),
    ],
)
def test_every_step_is_transformers(name, kwargs, warmup_steps, max_steps):
    if name == "polynomial" and warmup_steps == max_steps:
        pytest.skip("transformers divides by zero")
    rate = learning_rates(name, peak=PEAK, warmup_steps=warmup_steps, max_steps=max_steps, kwargs=kwargs)
    ours = [rate(step) for step in range(max_steps + 3)]
    assert ours == pytest.approx(theirs(name, warmup_steps, max_steps, kwargs), rel=0, abs=1e-12 * PEAK)


def test_rates_rise_to_the_peak_and_fall_to_zero():
    rate = learning_rates("linear", peak=PEAK, warmup_steps=4, max_steps=12)
    assert (rate(0), rate(4), rate(12)) == (0.0, PEAK, 0.0)


def test_the_kwargs_given_are_left_as_they_are():
    kwargs = {"num_cycles": 1}
    learning_rates("cosine", peak=PEAK, warmup_steps=0, max_steps=3, kwargs=kwargs)
    assert kwargs == {"num_cycles": 1}


def test_the_keys_that_the_table_knows_are_those_that_schedules_take():
    from transformers.trainer_utils import SchedulerType

    assert set(SCHEDULES) == {name.value for name in SchedulerType}
    for name, keys in SCHEDULES.items():
        made = FOLLOWING[name] if name in ADAPTIVE else schedules._SCHEDULES[name]
        assert list(inspect.signature(made).parameters)[1:] == keys.split(), name


def test_a_polynomial_ends_below_its_beginning():
    with pytest.raises(ValueError, match="lr_end=1 is not below learning_rate=0.0003. Choose a smaller lr_end."):
        learning_rates("polynomial", peak=PEAK, warmup_steps=0, max_steps=3, kwargs={"lr_end": 1})
