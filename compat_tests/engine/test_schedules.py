"""Learning rates beside transformers' schedulers, at every step of a run."""

from __future__ import annotations

import pytest

from trl_jax.core.arguments import SUPPORTED
from trl_jax.engine.schedules import learning_rates

PEAK = 3e-4


def theirs(name, warmup_steps, max_steps, kwargs):
    torch = pytest.importorskip("torch")
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(name, optimizer, warmup_steps, max_steps, scheduler_specific_kwargs=kwargs)
    rates = []
    for _ in range(max_steps + 3):  # a little beyond the end, where rates must not rise again
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup_steps, max_steps", [(0, 40), (1, 40), (7, 40), (40, 40), (50, 40), (0, 1)])
@pytest.mark.parametrize(
    "name, kwargs",
    [(name, {}) for name in SUPPORTED["lr_scheduler_type"]]
    + [("cosine", {"num_cycles": 1.25}), ("cosine", {"num_cycles": 2})],
)
def test_every_step_is_transformers(name, kwargs, warmup_steps, max_steps):
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
