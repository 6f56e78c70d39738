"""Methods of transformers' Trainer that a script calls by name, as in `transformers.Trainer.evaluate(self, ...)`: of a
trainer of ours, ours are called.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

_ANSWERED = "_answers_for_trl_jax"


def answer_by_name(kind: type) -> None:
    """Let the methods of transformers' Trainer, `kind`, call those of our trainers where they are given one.

    For other trainers, TRL's among them, nothing changes.
    """
    if _ANSWERED in vars(kind):
        return
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and not name.startswith("__"):
            setattr(kind, name, _answering(name, method))
    setattr(kind, _ANSWERED, True)


def answer_if_loaded() -> None:
    """The same where transformers' Trainer is imported already: without torch, it cannot be."""
    if (module := sys.modules.get("transformers.trainer")) is not None:
        answer_by_name(module.Trainer)


def _answering(name: str, plain: Callable) -> Callable:
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
    """The refusal of a method of transformers' Trainer that our trainer, of this `kind`, does not have."""
    instead = kind._never_called.get(name, "Leave it out, or call a method that the trainer has.")
    return f"transformers.Trainer.{name} was called with a {kind.__name__}; trainers of trl_jax have none. {instead}"
