"""Tables of arguments: a config class has one, with a line for each of its fields.

native: works as in TRL.  mapped: done with what JAX has for it (a line's text is then a warning where it is used).
silent: accepted, because nothing would change.  warned: accepted without effect, with a warning.
refused: an error when away from its default.  A rule may refuse single values of any of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trl_jax.core.arguments.rules import HERE, Rule
from trl_jax.core.arguments.values import show
from trl_jax.core.secrets import scrubbed

Kind = Literal["native", "mapped", "silent", "warned", "refused"]


@dataclass(frozen=True)
class Handling:
    """An argument's line in a table.

    Attributes:
        text: of a warning or refusal, why and what to do instead.
        rule: refuses single values.
        note: makes the warning for an accepted value, where it depends on the value.
        is_off: true of values that mean the default though they are not equal to it.
    """

    kind: Kind
    text: str = ""
    rule: Rule | None = None
    note: Rule | None = None
    is_off: Callable[[Any], bool] | None = None


def fields(names: str, kind: Kind, text: str = "", **rules: Any) -> dict[str, Handling]:
    """The same line for each of several arguments, whose names are divided by spaces."""
    return {name: Handling(kind, text, **rules) for name in names.split()}


def defaults_of(fields: Iterable[dataclasses.Field]) -> dict[str, Any]:
    """name -> default, for every field that has one."""
    made = {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
    plain = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    return plain | made


def validate(
    table: Mapping[str, Handling], values: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Check values against a table: (refusals, warnings), one line each.

    Args:
        values: holds every name of the table; other names (fields that a script's own class adds) are left alone.
        defaults: this release's. A default that a script's own class changed counts like a value that was passed.
    """
    refusals, warnings = [], []
    for name, line in table.items():
        value = values[name]
        if isinstance(value, np.ndarray):  # whose comparisons are arrays
            refusals.append(f"{show(name, value)} is an array: no argument takes one. Pass a plain value.")
        elif line.rule is not None and (problem := line.rule(name, value, values)):
            refusals.append(problem)
        elif differs_from_default(value, defaults[name], line):
            if line.kind == "refused":
                refusals.append(f"{show(name, value)} is not {HERE}: {line.text}")
            elif line.kind == "warned":
                warnings.append(f"{show(name, value)} has no effect in trl_jax: {line.text}")
            elif line.kind == "mapped" and line.text:
                warnings.append(f"{show(name, value)}: {line.text}")
            elif line.note is not None and (note := line.note(name, value, values)):
                warnings.append(note)
    return [scrubbed(line) for line in refusals], [scrubbed(line) for line in warnings]


def differs_from_default(value: Any, default: Any, line: Handling) -> bool:
    if line.is_off is not None and line.is_off(value):
        return False
    return value != default
