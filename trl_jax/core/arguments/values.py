"""Reads an argument's value, which a script, a command line and a YAML file write differently."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum
from functools import cache
from numbers import Integral
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np

from trl_jax.core.secrets import masked


def plain(value: Any) -> Any:
    """An enum's own value; anything else as it is."""
    return value.value if isinstance(value, Enum) else value


def show(name: str, value: Any) -> str:
    """name=value for an error's text: secrets hidden, long values cut."""
    text = repr(masked(plain(value), name))
    return f"{name}={text if len(text) <= 60 else text[:57] + '...'}"


def as_dict(name: str, value: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """The dict of an argument that is written as a mapping, as a JSON object in a string, or left at None.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{show(name, value)} is not JSON ({error}): {_wanted_dict(name)}") from error
    if dataclasses.is_dataclass(value):
        value = dataclasses.asdict(value)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{show(name, value)} is a {type(value).__name__}: {_wanted_dict(name)}")
    return dict(value or {})


def as_dict_or_file(name: str, value: Any) -> dict[str, Any]:
    """The same, where a string may also be the path of a JSON file."""
    if not isinstance(value, str) or value.lstrip().startswith("{"):
        return as_dict(name, value)
    if not Path(value).is_file():
        raise ValueError(f"{show(name, value)}: there is no such file. Pass a JSON file, a dict, or leave it out.")
    return as_dict(name, Path(value).read_text(encoding="utf-8"))


def _wanted_dict(name: str) -> str:
    return f"""pass {name} as a dict, or as a JSON object in a string such as '{{"key": 1}}'."""


def as_pad_multiple(name: str, value: int | str | None) -> int | str | None:
    """A number of tokens, "auto" or None; the command line and YAML may write each of them as text.

    Raises:
        ValueError: it is none of these.
    """
    named = {"auto": "auto", "none": None, "null": None}
    multiple = value
    if isinstance(value, str):
        multiple = int(value) if value.isdecimal() else named.get(value.lower(), value)
    if multiple is None or multiple == "auto" or is_whole(multiple, 1):
        return multiple
    raise ValueError(f'{show(name, value)}: wanted "auto", a whole number of at least 1, or None.')


def as_choice(value: str | bool | None) -> str | bool | None:
    """`resume_from_checkpoint` as train() takes it: a command line gives True and False as words."""
    named = {"true": True, "false": None, "none": None, "": None}
    return named.get(value.lower(), value) if isinstance(value, str) else value or None


_BOOLS = dict.fromkeys(("yes", "true", "t", "y", "1"), True) | dict.fromkeys(("no", "false", "f", "n", "0"), False)


def as_bool(name: str, value: Any, optional: bool = False) -> bool | None:
    """A boolean, which may be written as 0 or 1, or as a word that HfArgumentParser reads.

    Args:
        optional: None is allowed, too.

    Raises:
        ValueError: it is none of these. By Python's own rule any other text would be true, "off" included.
    """
    if value is None and optional:
        return None
    if isinstance(value, str) and value.lower() in _BOOLS:
        return _BOOLS[value.lower()]
    if isinstance(value, bool | np.bool_ | Integral) and value in (0, 1):
        return bool(value)
    raise ValueError(wanted_bool(name, value, optional))


def wanted_bool(name: str, value: Any, optional: bool) -> str:
    none = ", None" if optional else ""
    words = "yes/no, true/false, t/f, y/n, 1/0 (case insensitive)"  # as HfArgumentParser lists them
    return f"{show(name, value)}: wanted True, False{none}, or one of {words}."


@cache
def bool_fields(kind: type) -> dict[str, bool]:
    """The boolean fields of a dataclass -> whether each may be None."""
    hints = get_type_hints(kind)
    kinds = {f.name: set(get_args(hints[f.name])) or {hints[f.name]} for f in dataclasses.fields(kind)}
    return {name: NoneType in found for name, found in kinds.items() if found - {NoneType} == {bool}}


def read_bools(config: Any) -> None:
    """Convert the boolean fields of a dataclass to bool.

    Raises:
        ValueError: as `as_bool`.
    """
    for name, optional in bool_fields(type(config)).items():
        setattr(config, name, as_bool(name, vars(config)[name], optional))


def as_words(value: Any) -> list[str]:
    """The words of an argument that takes them in a string, in a list, or as a truth value."""
    if isinstance(value, bool) or value is None:
        return []
    return [plain(word) for word in (value.split() if isinstance(value, str) else value)]


def is_whole(value: Any, minimum: int) -> bool:
    """Whether it is a whole number of at least `minimum`; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= minimum
