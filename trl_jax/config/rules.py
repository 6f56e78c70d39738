"""Rules that check an argument's value, and readers of values written in scripts, command lines and YAML."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np

from trl_jax.core.secrets import masked

# ----------------------------------------------------------------------------------------------------
# Rules: functions that check the value of one argument


Rule = Callable[[str, Any, Mapping[str, Any]], str | None]

HERE = "in this release of trl_jax"
# Larger values cannot work: steps are counted in 32 bits, rates are float32, and a step's examples are all in memory.
MOST_STEPS = 2**31 - 1
MOST_INTERVAL = 2**62  # steps between two logs, saves or evaluations
MOST_FLOAT32 = 3.4028234663852886e38
MOST_EXAMPLES = 2**20  # in a step
MOST_MICRO_BATCHES = 2**16  # in a step
MOST_PADDED = 2**20  # tokens that a row's length may be a multiple of
MOST_PROCESSES = 2**22  # Linux's limit of process ids


def one_of(*supported: str) -> Rule:
    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        if plain(value) in supported:
            return None
        return f"{show(name, value)} is not {HERE}; supported: {', '.join(supported)}."

    return rule


def too_large(name: str, value: Any, most: float) -> str:
    return must_be(name, f"at most {most if isinstance(most, float) else format(most, ',')}", value)


def whole(minimum: int, optional: bool = False, *, most: float = math.inf) -> Rule:
    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        if value is None and optional:
            return None
        if is_whole(value, minimum):
            return too_large(name, value, most) if value > most else None
        return must_be(name, f"a whole number of at least {minimum}{_or_none(optional)}", value)

    return rule


def number(minimum: float, optional: bool = False, *, most: float = math.inf) -> Rule:
    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        if value is None and optional:
            return None
        if isinstance(value, Real) and not isinstance(value, bool) and minimum <= value < math.inf:
            return too_large(name, value, most) if value > most else None
        return must_be(name, f"a number of at least {minimum:g}{_or_none(optional)}", value)

    return rule


def bounded(most: float = math.inf, optional: bool = False) -> Rule:
    """A number that is not NaN and at most `most`. A lower bound, if any, is checked by transformers."""

    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        if value is None and optional:
            return None
        if not isinstance(value, Real) or isinstance(value, bool) or value != value:
            return must_be(name, f"a number{_or_none(optional)}", value)
        return too_large(name, value, most) if value > most else None

    return rule


def path(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if isinstance(value, str | PathLike | None):
        return None
    return must_be(name, "a path, a name or None", value)


def text(optional: bool = False) -> Rule:
    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        if isinstance(value, str) or (value is None and optional):
            return None
        return must_be(name, f"a string{_or_none(optional)}", value)

    return rule


def words(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    """A string, a list of strings, or None."""
    several = [value] if isinstance(value, str | None) else value
    if isinstance(several, list | tuple | set) and all(isinstance(word, str | None) for word in several):
        return None
    return must_be(name, "a string, a list of strings or None", value)


def accumulation(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := whole(1, most=MOST_MICRO_BATCHES)(name, value, values):
        return problem
    pairs = values["per_device_train_batch_size"]
    if whole(1, most=MOST_EXAMPLES)("", pairs, values) is not None or value * pairs <= MOST_EXAMPLES:
        return None  # or the rule of the batch size refuses it
    return (
        f"gradient_accumulation_steps x per_device_train_batch_size must be at most {MOST_EXAMPLES:,}, got {value} x "
        f"{pairs} = {value * pairs:,}. Lower one of them."
    )


def _or_none(optional: bool) -> str:
    return " or None" if optional else ""


def epochs(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    # Scripts that set max_steps often leave num_train_epochs at -1.
    counted = isinstance(values["max_steps"], Real) and values["max_steps"] > 0
    return None if counted else number(0, most=MOST_STEPS)(name, value, values)


def a_dict(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    try:
        as_dict(name, value)
    except ValueError as error:
        return str(error)
    return None


def template_arguments(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    """A dict without the arguments of apply_chat_template that the trainer passes itself."""
    if fault := a_dict(name, value, values):
        return fault
    reserved = ("conversation", "tools", "chat_template", "add_generation_prompt", "tokenize", "return_dict")
    if taken := [key for key in as_dict(name, value) if key in reserved]:
        return (
            f"{name} has {taken[0]!r}, which the trainer passes itself: apply_chat_template would get multiple values "
            f"for keyword argument {taken[0]!r}. Leave it out, and use chat_template_path= for the template and tools= "
            "for the tools."
        )
    return None


def debug_words(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if not isinstance(value, bool) and (problem := words(name, value, values)):
        return problem
    unknown = [word for word in as_words(value) if word not in ("underflow_overflow", "tpu_metrics_debug")]
    return must_be(name, "underflow_overflow or tpu_metrics_debug", unknown) if unknown else None


def debug_note(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    note = f"{name}: tpu_metrics_debug has no effect in trl_jax, because XLA has no such log."
    return note if "tpu" in str(as_words(value)) else None


def metric_inputs(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if not isinstance(value, list | tuple | set | None):
        return must_be(name, "a list with inputs, loss or both", value)
    unknown = [word for word in value or () if word not in ("inputs", "loss")]
    return must_be(name, "a list with inputs, loss or both", value) if unknown else None


def tokens_seen(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    valid = ("all", "non_padding", "no", True, False)
    return None if value in valid else must_be(name, "'all', 'non_padding' or 'no'", value)


def pad_multiple(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    try:
        multiple = as_pad_multiple(name, value)
    except ValueError as error:
        return str(error)
    return too_large(name, value, MOST_PADDED) if isinstance(multiple, int) and multiple > MOST_PADDED else None


# ----------------------------------------------------------------------------------------------------
# Readers: scripts, command lines and YAML files write the same value differently


def plain(value: Any) -> Any:
    """The value of an enum; anything else unchanged."""
    return value.value if isinstance(value, Enum) else value


def show(name: str, value: Any) -> str:
    """name=value for an error message; secrets are masked and long values cut."""
    return f"{name}={_brief(name, value)}"


def array_error(name: str, value: Any) -> str:
    return f"{name}={_brief('', value)} is an array, but no argument takes one. Pass a plain value."


def must_be(name: str, valid: str, value: Any) -> str:
    """The error message for `value`; `valid` describes the values that are allowed."""
    return f"{name} must be {valid}, got {_brief(name, value)}."


def _brief(name: str, value: Any) -> str:
    text = repr(masked(plain(value), name))
    return text if len(text) <= 60 else text[:57] + "..."


def as_dict(name: str, value: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """The dict in an argument: a mapping, a dataclass, a string with a JSON object, or None for an empty dict.

    Raises:
        ValueError: any other value.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{_dict_error(name, value)} It is not valid JSON: {error}.") from error
    if dataclasses.is_dataclass(value):
        value = dataclasses.asdict(value)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(_dict_error(name, value))
    return dict(value or {})


def as_dict_or_file(name: str, value: Any) -> dict[str, Any]:
    """Like `as_dict`, but a string may also be the path of a JSON file."""
    if not isinstance(value, str) or value.lstrip().startswith("{"):
        return as_dict(name, value)
    if not os.path.isfile(value):  # Path.is_file would raise if the name is too long
        raise ValueError(f"{show(name, value)}: there is no such file. Pass a JSON file or a dict, or leave it out.")
    return as_dict(name, Path(value).read_text(encoding="utf-8"))


def _dict_error(name: str, value: Any) -> str:
    return must_be(name, """a dict, or a JSON object in a string such as '{"key": 1}'""", value)


def as_pad_multiple(name: str, value: int | str | None) -> int | str | None:
    """A number of tokens, "auto" or None. A command line or YAML may pass each of them as a string.

    Raises:
        ValueError: any other value.
    """
    words = {"auto": "auto", "none": None, "null": None}
    multiple = value
    if isinstance(value, str):
        multiple = int(value) if value.isdecimal() else words.get(value.lower(), value)
    if multiple is None or multiple == "auto" or is_whole(multiple, 1):
        return multiple
    raise ValueError(must_be(name, '"auto", a whole number of at least 1, or None', value))


def as_choice(value: str | bool | None) -> str | bool | None:
    """`resume_from_checkpoint` in the form that train() accepts: command lines pass True and False as strings."""
    words = {"true": True, "false": None, "none": None, "": None}
    return words.get(value.lower(), value) if isinstance(value, str) else value or None


_BOOLS = dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(("no", "false", "f", "n", "0"), False)


def as_bool(name: str, value: Any, optional: bool = False) -> bool | None:
    """A boolean, also written as 0 or 1 or as a word that HfArgumentParser reads.

    Args:
        optional: None is allowed, too.

    Raises:
        ValueError: any other value. Python treats every other string as true, even "off".
    """
    if value is None and optional:
        return None
    if isinstance(value, str) and value.lower() in _BOOLS:
        return _BOOLS[value.lower()]
    if isinstance(value, bool | np.bool_ | Integral) and value in (0, 1):
        return bool(value)
    raise ValueError(bool_error(name, value, optional))


def bool_error(name: str, value: Any, optional: bool) -> str:
    none = ", None" if optional else ""
    words = "yes/no, true/false, t/f, y/n, 1/0 (case insensitive)"  # as HfArgumentParser lists them
    return must_be(name, f"True, False{none}, or one of {words}", value)


@cache
def bool_fields(cls: type) -> dict[str, bool]:
    """The boolean fields of a dataclass -> whether each may be None."""
    hints = get_type_hints(cls)
    types = {f.name: set(get_args(hints[f.name])) or {hints[f.name]} for f in dataclasses.fields(cls)}
    return {name: NoneType in options for name, options in types.items() if options - {NoneType} == {bool}}


def read_bools(config: Any) -> None:
    """Convert the boolean fields of a dataclass to bool.

    Raises:
        ValueError: as `as_bool`.
    """
    for name, optional in bool_fields(type(config)).items():
        setattr(config, name, as_bool(name, vars(config)[name], optional))


def as_words(value: Any) -> list[str]:
    """The words in an argument that takes a string of words, a list of them, or a boolean."""
    if isinstance(value, bool) or value is None:
        return []
    return [plain(word) for word in (value.split() if isinstance(value, str) else value)]


def is_whole(value: Any, minimum: int) -> bool:
    """Whether it is a whole number of at least `minimum`. Booleans do not count as numbers."""
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= minimum
