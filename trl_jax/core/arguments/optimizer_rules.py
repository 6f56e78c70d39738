"""Rules of optimizers and learning rates; see `rules`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trl_jax.core.arguments.optimizers import NEAREST, OPTIMIZERS, parsed
from trl_jax.core.arguments.rules import HERE, a_dict, number, one_of
from trl_jax.core.arguments.values import as_dict, plain, show

# Schedule -> the keys of lr_scheduler_kwargs that it takes.
SCHEDULES = {
    "linear": "",
    "cosine": "num_cycles",
    "cosine_with_restarts": "num_cycles",
    "polynomial": "lr_end power",
    "constant": "",
    "constant_with_warmup": "",
    "inverse_sqrt": "timescale",
    "reduce_lr_on_plateau": "mode factor patience threshold threshold_mode cooldown min_lr eps",
    "cosine_with_min_lr": "num_cycles min_lr min_lr_rate",
    "cosine_warmup_with_min_lr": "num_cycles min_lr min_lr_rate warmup_lr_rate",
    "warmup_stable_decay": "num_decay_steps num_stable_steps warmup_type decay_type min_lr_ratio num_cycles",
    "greedy": "mode factor patience threshold threshold_mode cooldown warmup min_lr max_lr eps smooth window_size "
              "reset_start",
}  # fmt: skip
ADAPTIVE = ("reduce_lr_on_plateau", "greedy")


def beta(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    """Adam divides by one less a power of it; torch refuses it, too."""
    if problem := number(0)(name, value, values):
        return problem
    if value >= 1 and "adam" in str(plain(values["optim"])):
        return f"{show(name, value)}: wanted a number of at least 0 and below 1."
    return None


def scheduler(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := one_of(*SCHEDULES)(name, value, values):
        return problem
    if plain(value) in ADAPTIVE and plain(values["eval_strategy"]) == "no":
        return f"{show(name, value)} follows a metric of the evaluation, and eval_strategy is 'no'. Set eval_strategy."
    return None


def scheduler_kwargs(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    schedule = plain(values["lr_scheduler_type"])
    if problem := a_dict(name, value, values):
        return problem
    if schedule not in SCHEDULES:
        return None  # `scheduler` refuses it
    kwargs, known = as_dict(name, value), SCHEDULES[schedule].split()
    if unknown := [key for key in kwargs if key not in known]:
        takes = ", ".join(known) or "no keys"
        return f"{name} holds {unknown}: lr_scheduler_type={schedule!r} takes {takes}. Leave {unknown} out."
    if schedule == "warmup_stable_decay" and "num_decay_steps" not in kwargs:
        return f"lr_scheduler_type={schedule!r} needs {name}={{'num_decay_steps': STEPS}}."
    if "min_lr_rate" in known and (kwargs.get("min_lr") is None) == (kwargs.get("min_lr_rate") is None):
        return f"lr_scheduler_type={schedule!r} needs {name} with one of min_lr and min_lr_rate, and found {kwargs}."
    if none := [key for key, found in kwargs.items() if isinstance(found, float) and math.isnan(found)]:
        return f"{name} holds {none[0]}=nan: wanted a number."
    return _known_words(name, kwargs)


_WORDS = {
    "warmup_type": ("linear", "cosine", "1-sqrt"), "decay_type": ("linear", "cosine", "1-sqrt"),
    "mode": ("min", "max"), "threshold_mode": ("rel", "abs"),
}  # fmt: skip


def _known_words(name: str, kwargs: Mapping[str, Any]) -> str | None:
    for key, words in _WORDS.items():
        if key in kwargs and kwargs[key] not in words:
            return f"{name} holds {key}={kwargs[key]!r}: wanted one of {', '.join(words)}."
    return None


def optimizer(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    value = plain(value)
    if value in NEAREST:
        return f"{show(name, value)} is not {HERE}; the nearest that is: {NEAREST[value]}."
    return one_of(*OPTIMIZERS)(name, value, values)


def optimizer_note(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    note = OPTIMIZERS[plain(value)].note
    return f"{show(name, value)}: {note}" if note else None


def optimizer_args(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    optim = plain(values["optim"])
    if optim not in OPTIMIZERS:
        return None  # `optimizer` refuses it
    try:
        parsed(optim, value)
    except ValueError as error:
        return str(error)
    return None
