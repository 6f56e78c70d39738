"""Reads an argument's value, which a script, a command line and a YAML file write differently."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum
from numbers import Integral
from pathlib import Path
from typing import Any

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


def as_words(value: Any) -> list[str]:
    """The words of an argument that takes them in a string, in a list, or as a truth value."""
    if isinstance(value, bool) or value is None:
        return []
    return [plain(word) for word in (value.split() if isinstance(value, str) else value)]


def is_whole(value: Any, minimum: int) -> bool:
    """Whether it is a whole number of at least `minimum`; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= minimum
