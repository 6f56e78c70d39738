"""Support for scripts that call `transformers.Trainer` methods by name, as in `transformers.Trainer.evaluate(self)`.

If `self` is a trainer of trl_jax, its own method runs instead.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

_PATCHED = "_answers_for_trl_jax"


def answer_by_name(kind: type) -> None:
    """Patch the methods of `kind`, transformers' Trainer, to dispatch to trl_jax trainers when called with one.

    Other trainers, including TRL's, behave as before.
    """
    if _PATCHED in vars(kind):
        return
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and not name.startswith("__"):
            setattr(kind, name, _dispatching(name, method))
    setattr(kind, _PATCHED, True)


def answer_if_loaded() -> None:
    """Patch transformers' Trainer if it is already imported. Without torch, it cannot be."""
    if (module := sys.modules.get("transformers.trainer")) is not None:
        answer_by_name(module.Trainer)


def _dispatching(name: str, plain: Callable) -> Callable:
    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = [cls for cls in type(self).__mro__ if cls.__module__.partition(".")[0] == "trl_jax"]
        if not ours:
            return plain(self, *args, **kwargs)
        own = next((vars(cls)[name] for cls in ours if name in vars(cls)), None)
        if own is None:
            raise TypeError(refusal(name, type(self)))
        return own(self, *args, **kwargs)

    return method


def refusal(name: str, kind: type) -> str:
    """The error for a method of transformers' Trainer that trainers of class `kind` do not have."""
    instead = kind._never_called.get(name, "Leave it out, or call a method that the trainer has.")
    return f"transformers.Trainer.{name} was called with a {kind.__name__}; trl_jax trainers do not have it. {instead}"
