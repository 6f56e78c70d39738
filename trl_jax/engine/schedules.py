"""Learning rates as functions of the step, in Python floats: what TRL logs, to the last digit."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def learning_rates(
    name: str, *, peak: float, warmup_steps: int, max_steps: int, kwargs: dict | None = None
) -> Schedule:
    """The learning rate of the optimizer step that follows `step` finished ones.

    Args:
        name: one of `core.arguments.SUPPORTED["lr_scheduler_type"]`. All but constant rise linearly from 0 over
            `warmup_steps`.
        peak: the highest rate.
        max_steps: where linear and cosine reach their end.
        kwargs: for cosine `num_cycles`, half-waves counted in whole waves (0.5 falls to 0 once); other keys were
            refused with the arguments.
    """
    wave = math.pi * 2.0 * float((kwargs or {}).get("num_cycles", 0.5))
    warmup_steps = 0 if name == "constant" else warmup_steps
    falling_steps = max(1, max_steps - warmup_steps)
    after_warmup = {
        "linear": lambda step: max(0.0, (max_steps - step) / falling_steps),
        "cosine": lambda step: max(0.0, 0.5 * (1.0 + math.cos(wave * (step - warmup_steps) / falling_steps))),
        "constant": lambda step: 1.0,
        "constant_with_warmup": lambda step: 1.0,
    }[name]

    def rate(step: int) -> float:
        return peak * (step / warmup_steps if step < warmup_steps else after_warmup(step))

    return rate
