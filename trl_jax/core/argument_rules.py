"""Rules: small functions that look at one argument's value and say what is wrong with it, or None.

A rule is called as rule(name, value, values), with `values` the whole configuration, and answers with one
line that names the argument, the value found, the value wanted and the way out.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from enum import Enum
from numbers import Integral, Real
from typing import Any

Rule = Callable[[str, Any, Mapping[str, Any]], str | None]

HERE = "in this release of trl_jax"
NO_ACCELERATE = "there is no accelerate here to configure; leave it out."
DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops=true"
# What accelerate's AcceleratorConfig holds when nobody has touched it.
ACCELERATOR_DEFAULTS = {
    "split_batches": False, "dispatch_batches": None, "even_batches": True, "use_seedable_sampler": True,
    "non_blocking": False, "gradient_accumulation_kwargs": None, "use_configured_state": False,
}  # fmt: skip


def plain(value: Any) -> Any:
    """An enum's own value; anything else as it is."""
    return value.value if isinstance(value, Enum) else value


def show(name: str, value: Any) -> str:
    """name=value for an error's text: secrets hidden, long values cut."""
    text = "<hidden>" if name == "hub_token" else repr(plain(value))
    return f"{name}={text if len(text) <= 60 else text[:57] + '...'}"


def as_dict(name: str, value: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """The mapping that a dict-valued argument means: a mapping, a JSON object in a string, or nothing.

    Raises ValueError on anything else.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{show(name, value)} is not JSON ({error}): {_wanted_dict(name)}") from error
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{show(name, value)} is a {type(value).__name__}: {_wanted_dict(name)}")
    return dict(value or {})


def _wanted_dict(name: str) -> str:
    return f"""pass {name} as a dict, or as a JSON object in a string such as '{{"key": 1}}'."""


def as_pad_multiple(name: str, value: int | str | None) -> int | str | None:
    """Tokens, "auto" or None; the command line and YAML may give each of them as text.

    Raises ValueError on anything else.
    """
    words = {"auto": "auto", "none": None, "null": None}
    meant = value
    if isinstance(value, str):
        meant = int(value) if value.isdecimal() else words.get(value.lower(), value)
    if meant is None or meant == "auto" or whole(1)(name, meant, {}) is None:
        return meant
    raise ValueError(f'{show(name, value)}: wanted "auto", a whole number of at least 1, or None.')


def as_choice(value: str | bool | None) -> str | bool | None:
    """What resume_from_checkpoint means: a command line gives True and False as words."""
    words = {"true": True, "false": None, "none": None, "": None}
    return words.get(value.lower(), value) if isinstance(value, str) else value or None


def one_of(*supported: str) -> Rule:
    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        if plain(value) in supported:
            return None
        return f"{show(name, value)} is not {HERE}; supported: {', '.join(supported)}."

    return rule


def whole(minimum: int, optional: bool = False) -> Rule:
    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        if value is None and optional:
            return None
        if isinstance(value, Integral) and not isinstance(value, bool) and value >= minimum:
            return None
        return f"{show(name, value)}: wanted a whole number of at least {minimum}{_or_none(optional)}."

    return rule


def number(minimum: float, optional: bool = False) -> Rule:
    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        if value is None and optional:
            return None
        if isinstance(value, Real) and not isinstance(value, bool) and minimum <= value < float("inf"):
            return None
        return f"{show(name, value)}: wanted a number of at least {minimum:g}{_or_none(optional)}."

    return rule


def _or_none(optional: bool) -> str:
    return " or None" if optional else ""


def epochs(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    # Scripts that count in max_steps often leave num_train_epochs at -1.
    return None if values["max_steps"] > 0 else number(0)(name, value, values)


def a_dict(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    try:
        as_dict(name, value)
    except ValueError as error:
        return str(error)
    return None


def scheduler_kwargs(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := a_dict(name, value, values):
        return problem
    schedule = plain(values["lr_scheduler_type"])
    known = ("num_cycles",) if schedule == "cosine" else ()
    unknown = [key for key in as_dict(name, value) if key not in known]
    if not unknown:
        return None
    takes = ", ".join(known) or "no keys"
    return f"{name} holds {unknown}: lr_scheduler_type={schedule!r} takes {takes}. Leave {unknown} out."


def checkpointing_kwargs(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := a_dict(name, value, values):
        return problem
    unknown = [key for key in as_dict(name, value) if key != "use_reentrant"]
    if not unknown:
        return None
    return f"{name} holds {unknown}, which are not {HERE}: it takes use_reentrant only. Leave {unknown} out."


def deterministic(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    # A GPU is deterministic only if XLA was told so before it started; CPU and TPU always are.
    if not value or values["use_cpu"] or DETERMINISTIC_FLAG in os.environ.get("XLA_FLAGS", ""):
        return None
    return (
        f"{name}=True needs XLA_FLAGS={DETERMINISTIC_FLAG} in the environment before Python starts, and found"
        f" XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}. Set it, or pass use_cpu=True."
    )


def untouched_accelerator(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if dataclasses.is_dataclass(value):
        value = dataclasses.asdict(value)
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        return f"{show(name, value)} (a file) is not {HERE}: {NO_ACCELERATE}"
    if problem := a_dict(name, value, values):
        return problem
    unset = object()
    touched = [k for k, v in as_dict(name, value).items() if ACCELERATOR_DEFAULTS.get(k, unset) != v]
    if not touched:
        return None
    return f"{name} sets {touched}, which are not {HERE}: {NO_ACCELERATE}"


def pad_multiple(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    try:
        as_pad_multiple(name, value)
    except ValueError as error:
        return str(error)
    return None
