"""Allowed values of `optim`, `optim_args` and the learning rate schedule, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from trl_jax.config.rules import HERE, MOST_FLOAT32, a_dict, as_dict, must_be, number, one_of, plain, show, text

# ----------------------------------------------------------------------------------------------------
# Rules for optimizers and learning rates


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
    """Adam and AdEMAMix divide by 1 - beta**t, and Lion's average would not move, so beta must be below 1."""
    if problem := number(0)(name, value, values):
        return problem
    if value >= 1 and any(rule in str(plain(values["optim"])) for rule in ("adam", "ademamix", "lion")):
        return must_be(name, "a number of at least 0 and below 1", value)
    return None


def scheduler(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := one_of(*SCHEDULES)(name, value, values):
        return problem
    if plain(value) in ADAPTIVE and plain(values["eval_strategy"]) == "no":
        return f"{show(name, value)} follows an evaluation metric, but eval_strategy is 'no'. Set eval_strategy."
    return None


def scheduler_kwargs(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    schedule = plain(values["lr_scheduler_type"])
    if problem := a_dict(name, value, values):
        return problem
    if one_of(*SCHEDULES)("", schedule, values):
        return None  # `scheduler` rejects it
    kwargs, keys = as_dict(name, value), SCHEDULES[schedule].split()
    if unknown := [key for key in kwargs if key not in keys]:
        takes = ", ".join(keys) or "no keys"
        return f"{name} has the keys {unknown}, but lr_scheduler_type={schedule!r} takes {takes}. Leave them out."
    if schedule == "warmup_stable_decay" and "num_decay_steps" not in kwargs:
        return f"lr_scheduler_type={schedule!r} requires {name}={{'num_decay_steps': STEPS}}."
    if "min_lr_rate" in keys and (kwargs.get("min_lr") is None) == (kwargs.get("min_lr_rate") is None):
        return f"lr_scheduler_type={schedule!r} requires either min_lr or min_lr_rate in {name}, got {kwargs}."
    for key, setting in kwargs.items():
        number = isinstance(setting, Real) and abs(setting) <= MOST_FLOAT32
        if not number and key not in _WORDS and not (setting is None and key in _OPTIONAL):
            return must_be(f"{key} of {name}", f"a number{' or None' if key in _OPTIONAL else ''}", setting)
    if (
        "min_lr" in keys
        and kwargs.get("min_lr") is not None
        and schedule not in ADAPTIVE
        and not values["learning_rate"]
    ):
        return f"min_lr of {name} is divided by learning_rate, which is 0. Leave it out, or use min_lr_rate."
    return _check_words(name, kwargs)


_OPTIONAL = ("min_lr", "min_lr_rate", "num_stable_steps", "timescale", "warmup_lr_rate")
_WORDS = {
    "warmup_type": ("linear", "cosine", "1-sqrt"), "decay_type": ("linear", "cosine", "1-sqrt"),
    "mode": ("min", "max"), "threshold_mode": ("rel", "abs"),
}  # fmt: skip


def _check_words(name: str, kwargs: Mapping[str, Any]) -> str | None:
    for key, words in _WORDS.items():
        if key in kwargs and kwargs[key] not in words:
            return f"{key} of {name} must be one of {', '.join(words)}, got {kwargs[key]!r}."
    return None


def optimizer(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    value = plain(value)
    if isinstance(value, str) and value in NEAREST:
        return f"{show(name, value)} is not {HERE}; the closest supported optimizer is {NEAREST[value]}."
    return one_of(*OPTIMIZERS)(name, value, values)


def optimizer_note(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    note = OPTIMIZERS[plain(value)].note
    return f"{show(name, value)}: {note}" if note else None


def optimizer_args(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    optim = plain(values["optim"])
    if problem := text(optional=True)(name, value, values):
        return problem
    if one_of(*OPTIMIZERS)("", optim, values):
        return None  # `optimizer` rejects it
    try:
        parse_optim_args(optim, value)
    except ValueError as error:
        return str(error)
    return None


# ----------------------------------------------------------------------------------------------------
# Values of `optim`, and the keys of `optim_args` for each


_ADEMAMIX = dict.fromkeys(("beta1", "beta2", "beta3", "alpha", "eps"), float) | {"t_alpha": int, "t_beta3": int}
_FREE = {"r": float, "weight_lr_power": float}
_TAKES = {
    "adamw": {},
    "adafactor": {},
    "sgd": {"momentum": float, "dampening": float, "nesterov": bool},
    "adagrad": {"lr_decay": float, "eps": float},
    "rmsprop": {"momentum": float, "alpha": float, "eps": float, "centered": bool},
    "lion": {},
    "ademamix": _ADEMAMIX,
    **dict.fromkeys(("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"), _FREE),
}
# Keys that are arguments of their own -> what to write instead
INSTEAD = {
    "weight_decay": "weight_decay is an argument of its own",
    "beta1": "adam_beta1 is an argument of its own",
    "beta2": "adam_beta2 is an argument of its own",
    "betas": "adam_beta1 and adam_beta2 are arguments of their own",
    "eps": "adam_epsilon is an argument of its own",
    "lr": "learning_rate is an argument of its own",
}
_UNPAGED = "the optimizer state stays on the device, unpaged; results are the same."
_FULL = "the optimizer state is kept in 32 bits, {bytes} bytes per parameter; results equal the 32-bit optimizer's."
_HALF = "the first moment is bfloat16 and the second float32: 6 bytes per parameter, instead of 2 with 8 bits."


@dataclass(frozen=True)
class Optimizer:
    """Attributes:
    kind: the update rule.
    note: how it differs from TRL's, for a warning.
    fixed: hyperparameters that follow from the name.
    takes: key of `optim_args` -> its type.
    """

    kind: str
    note: str = ""
    fixed: dict[str, str] = field(default_factory=dict)
    takes: dict[str, type] = field(default_factory=dict)


def _optimizers(kind: str, names: str, note: str = "", takes: dict[str, type] | None = None, **fixed: str):
    takes = _TAKES[kind] if takes is None else takes
    return {name: Optimizer(kind, note, fixed, takes) for name in names.split()}


OPTIMIZERS: dict[str, Optimizer] = {
    **_optimizers("adamw", "adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused"),
    **_optimizers("adamw", "adamw_anyprecision", takes={
        "momentum_dtype": str, "variance_dtype": str, "use_kahan_summation": bool, "compensation_buffer_dtype": str}),
    **_optimizers("adamw", "paged_adamw_32bit", _UNPAGED),
    **_optimizers("adamw", "adamw_8bit adamw_bnb_8bit paged_adamw_8bit adamw_torch_8bit adamw_torch_4bit", _HALF,
             momentum_dtype="bfloat16"),
    **_optimizers("adafactor", "adafactor"),
    **_optimizers("sgd", "sgd"),
    **_optimizers("adagrad", "adagrad"),
    **_optimizers("rmsprop", "rmsprop rmsprop_bnb rmsprop_bnb_32bit"),
    **_optimizers("rmsprop", "rmsprop_bnb_8bit", _FULL.format(bytes=4)),
    **_optimizers("lion", "lion_32bit"),
    **_optimizers("lion", "paged_lion_32bit", _UNPAGED),
    **_optimizers("lion", "lion_8bit paged_lion_8bit", _FULL.format(bytes=4)),
    **_optimizers("ademamix", "ademamix"),
    **_optimizers("ademamix", "paged_ademamix_32bit", _UNPAGED),
    **_optimizers("ademamix", "ademamix_8bit paged_ademamix_8bit", _FULL.format(bytes=12)),
    **_optimizers("schedule_free_adamw", "schedule_free_adamw"),
    **_optimizers("schedule_free_radam", "schedule_free_radam"),
    **_optimizers("schedule_free_sgd", "schedule_free_sgd"),
}  # fmt: skip

# Optimizers that are not supported -> the closest supported one
NEAREST: dict[str, str] = {
    **dict.fromkeys("galore_adamw galore_adamw_layerwise apollo_adamw apollo_adamw_layerwise".split(), "adamw_torch"),
    **dict.fromkeys("galore_adamw_8bit galore_adamw_8bit_layerwise".split(), "adamw_8bit"),
    **dict.fromkeys("galore_adafactor galore_adafactor_layerwise lomo adalomo".split(), "adafactor"),
    **dict.fromkeys("stable_adamw grokadamw".split(), "adamw_torch"),
}


def parse_optim_args(name: str, text: str | None) -> dict[str, float | int | bool | str]:
    """Parse `optim_args`, as in "momentum=0.9,nesterov=true", for the optimizer `name`.

    Raises:
        ValueError: a key it does not take, or a value of the wrong kind.
    """
    takes, args = OPTIMIZERS[name].takes, {}
    for part in (text or "").replace(" ", "").split(","):
        if not part:
            continue
        key, equals, value = part.partition("=")
        if key not in takes:
            raise ValueError(_unknown_key_error(name, key, takes))
        if not equals:
            raise ValueError(f"optim_args must be KEY=VALUE pairs, got {text!r}: {key} has no value.")
        args[key] = _parse_value(key, value, takes[key])
    if args.get("nesterov") and (not args.get("momentum") or args.get("dampening")):
        raise ValueError(f"optim_args={text!r}: nesterov requires a momentum and no dampening.")
    return args


def _unknown_key_error(name: str, key: str, takes: dict[str, type]) -> str:
    way_out = INSTEAD.get(key, "leave it out")
    return f"optim_args has the key {key!r}, but optim={name!r} takes {', '.join(takes) or 'no keys'}; {way_out}."


def _parse_value(key: str, text: str, kind: type) -> float | int | bool | str:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    try:
        value = words[text.lower()] if kind is bool else kind(text)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(text)
        return value
    except (KeyError, ValueError) as error:
        raise ValueError(f"{key} of optim_args must be of type {kind.__name__}, got {text!r}.") from error
