"""Arguments of trainers by the names they had, and the class of `args` they took, in earlier releases of TRL."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from transformers import TrainingArguments

from trl_jax.core.arguments.renamed import GONE_FROM_TRL, OTHERWISE, translated, way_out
from trl_jax.run.arguments.base_config import BaseConfig

_GONE = {*GONE_FROM_TRL.split(), *OTHERWISE}


def accepting_old_keywords(*moved: str, first: Callable | None = None) -> Callable[[Callable], Callable]:
    """Make a trainer's `__init__` take `tokenizer=` and arguments that have moved, each with a FutureWarning.

    Args:
        moved: names of arguments, old or today's, that are the configuration's now.
        first: (trainer, positional arguments, arguments by name) -> those by name: translates a form of its own.
    """
    return functools.partial(_wrapped, frozenset(moved), first)


def _wrapped(moved: frozenset[str], first: Callable | None, init: Callable) -> Callable:
    accepted = inspect.signature(init).parameters

    @functools.wraps(init)
    def wrapped(self, *args: Any, **kwargs: Any) -> None:
        if first is not None:
            kwargs = first(self, args, kwargs)
        if "tokenizer" in kwargs:
            if "processing_class" in kwargs:
                raise TypeError("tokenizer and processing_class are one argument. Leave tokenizer out.")
            kwargs["processing_class"] = kwargs.pop("tokenizer")
            tell("tokenizer is an old name: pass it as processing_class.")
        for name in (kwargs.keys() & _GONE) - moved - accepted.keys():
            for note in translated({name: kwargs.pop(name)}, ())[2]:
                tell(note)
        if given := {name: kwargs.pop(name) for name in sorted(moved) if name in kwargs}:
            at = list(accepted).index("args") - 1  # without self
            args, kwargs = _with_moved(type(self).config_class, given, args, kwargs, at)
        for name in kwargs.keys() - accepted.keys():
            raise TypeError(f"{type(self).__name__} has no argument {name!r}: {way_out(name, accepted)}")
        init(self, *args, **kwargs)

    return wrapped


def _with_moved(
    kind: type[BaseConfig], given: dict[str, Any], args: tuple, kwargs: dict[str, Any], at: int
) -> tuple[tuple, dict[str, Any]]:
    """The trainer's arguments with a copy of its configuration, the one `at` this place, that has the values."""
    names = [f.name for f in fields(kind)]
    now, _, _ = translated(given, names)
    config = args[at] if len(args) > at else kwargs.get("args")
    written = ", ".join(f"{name}={value!r}" for name, value in now.items())
    if config is None:
        raise TypeError(f"{written} has no configuration to go to: pass {kind.__name__}({written}).")
    changed = copy.copy(as_config(config, kind))
    for name, value in now.items():
        setattr(changed, name, value)
    for old in given:
        new = translated({old: given[old]}, names)[0]
        tell(f"{old} is an argument of {kind.__name__} now: pass {kind.__name__}({', '.join(new)}=...).", above=1)
    if len(args) > at:
        return (*args[:at], changed, *args[at + 1 :]), kwargs
    return args, kwargs | {"args": changed}


def as_config(args: TrainingArguments, kind: type[BaseConfig]) -> BaseConfig:
    """Return a `kind` as it is, and make one of the TrainingArguments that scripts for early TRL pass.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(args, kind):
        return args
    if not isinstance(args, TrainingArguments) or isinstance(args, BaseConfig):
        raise TypeError(f"args is a {type(args).__module__}.{type(args).__qualname__}: wanted a {kind.__name__}.")
    warnings.warn(
        f"args is a TrainingArguments: its values were taken over, with {kind.__name__}'s defaults for the rest. Pass "
        f"a {kind.__name__}.",
        FutureWarning,
        stacklevel=4,
    )
    known = {f.name for f in fields(kind) if f.init}
    return kind(**{f.name: getattr(args, f.name) for f in fields(args) if f.name in known and f.init})


def tell(text: str, above: int = 0) -> None:
    """A FutureWarning at the line that calls a wrapped constructor; `above`: functions between the wrapper and this."""
    warnings.warn(text, FutureWarning, stacklevel=3 + above)
