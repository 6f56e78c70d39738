"""Declare an argument in one line: default, help, how it is handled, and the rule that checks its values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trl_jax.config.rules import HERE, Rule, array_error, show
from trl_jax.core.secrets import scrubbed

How = Literal["native", "mapped", "silent", "warned", "refused"]


@dataclass(frozen=True)
class Handling:
    """How an argument is handled.

    Attributes:
        how: "native": as in TRL; "mapped": mapped to the JAX equivalent; "silent" or "warned": no effect, without or
            with a warning; "refused": an error unless it has its default.
        why: the reason in a warning or error, and what to do instead.
        rule: checks a value and returns an error text or None.
        note: returns a warning about an accepted value, or None.
        is_off: whether a value means the same as the default.
        supported: the supported choices, if transformers has others.
        help: text of --help, for an argument of transformers that has a different meaning under JAX.
    """

    how: How = "native"
    why: str = ""
    rule: Rule | None = None
    note: Rule | None = None
    is_off: Callable[[Any], bool] | None = None
    supported: tuple[str, ...] = ()
    help: str = ""


class Help(str):
    """An argument's help text with its handling attached. The handling cannot have a key of its own in the metadata of
    the field, because HfArgumentParser passes every key to argparse."""

    handling: Handling


def arg(
    default: Any, *, help: str, choices: Iterable[str] | None = None, kw_only: bool = False, **handling: Any
) -> Any:
    """A field of a config class.

    Args:
        default: a list is copied for each config.
        choices: values accepted on the command line.
        handling: `how`, `why`, `rule`, `note`, `is_off` and `supported` of `Handling`.
    """
    return _field(default, help, Handling(**handling), {} if choices is None else {"choices": list(choices)}, kw_only)


def redeclared(field: dataclasses.Field, handling: Handling, **changes: Any) -> Any:
    """The same field for another class, with another `default`, `help`, `choices`, `kw_only` or handling.

    A changed `how` drops the `why`.
    """
    metadata = dict(field.metadata)
    (default,) = defaults_of([field]).values()
    default, text = changes.pop("default", default), metadata.pop("help", "")
    kw_only = changes.pop("kw_only", field.kw_only)
    if "choices" in changes:
        metadata["choices"] = list(changes.pop("choices"))
    if "help" in changes:
        text, changes["help"] = changes["help"], ""  # no longer what `handling.help` says
    if "how" in changes:
        changes = {"why": ""} | changes
    return _field(default, text, dataclasses.replace(handling, **changes), metadata, kw_only)


def _field(default: Any, text: str, handling: Handling, metadata: Mapping[str, Any], kw_only: bool) -> Any:
    help = Help(text)
    help.handling = handling
    metadata = {"help": help} | metadata
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: default.copy(), metadata=metadata, kw_only=kw_only)
    return dataclasses.field(default=default, metadata=metadata, kw_only=kw_only)


def declared(cls: type) -> dict[str, Handling]:
    """name -> handling, for the fields that `kind` or a base class declares with `arg`.

    A field that a user-defined subclass redeclares keeps its handling.
    """
    return {
        name: field.metadata["help"].handling
        for base in reversed(cls.__mro__)
        if dataclasses.is_dataclass(base)
        for name, field in base.__dataclass_fields__.items()
        if isinstance(field.metadata.get("help"), Help)
    }


def handled(names: str, how: How, why: str = "", **handling: Any) -> dict[str, Handling]:
    """The same handling for several arguments; `names` is separated by spaces."""
    return {name: Handling(how, why, **handling) for name in names.split()}


def defaults_of(fields: Iterable[dataclasses.Field]) -> dict[str, Any]:
    """name -> default, for every field that has one."""
    from_factories = {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
    plain_defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    return plain_defaults | from_factories


def validate(
    table: Mapping[str, Handling], values: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Check values against a table and return (errors, warnings), one line each.

    Args:
        values: has every name in the table; other names (fields of a user-defined subclass) are ignored.
        defaults: of this release. A default that a user-defined subclass changed is checked like a value that was
            passed.
    """
    refusals, warnings = [], []
    for name, handling in table.items():
        value = values[name]
        if isinstance(value, np.ndarray):  # comparing it would give an array
            refusals.append(array_error(name, value))
        elif handling.rule is not None and (problem := handling.rule(name, value, values)):
            refusals.append(problem)
        elif differs_from_default(value, defaults[name], handling):
            if handling.how == "refused":
                refusals.append(f"{show(name, value)} is not {HERE}: {handling.why}")
            elif handling.how == "warned":
                warnings.append(f"{show(name, value)} has no effect in trl_jax: {handling.why}")
            elif handling.how == "mapped" and handling.why:
                warnings.append(f"{show(name, value)}: {handling.why}")
            elif handling.note is not None and (note := handling.note(name, value, values)):
                warnings.append(note)
    return [scrubbed(line) for line in refusals], [scrubbed(line) for line in warnings]


def differs_from_default(value: Any, default: Any, handling: Handling) -> bool:
    if handling.is_off is not None and handling.is_off(value):
        return False
    return value != default
