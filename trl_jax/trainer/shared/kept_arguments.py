"""Attributes in which TRL's trainers keep arguments, and which their losses read step by step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

from trl_jax.tasks.task import Task


class Kept:
    """An attribute that has an argument's value from the constructor on, and counts instead of it from there.

    A script may set another value at any time: `make_task` reads the attribute, and the step follows the task. What is
    set before the constructor is overwritten there, as in TRL.
    """

    def __init__(self, argument: str, read: Callable[[Any], Any] | None = None):
        """
        Args:
            read: makes the attribute of the arguments, where it is not the value of `argument` itself.
        """
        self.argument, self._read = argument, read
        self.__doc__ = f"`args.{argument}`, or what was set since."

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        kept = vars(trainer).get("_kept", {})
        return kept[self._name] if self._name in kept else self.of(trainer.args)

    def __set__(self, trainer: Any, value: Any) -> None:
        if "_kept" in vars(trainer):
            trainer._kept[self._name] = value

    def of(self, args: Any) -> Any:
        """The attribute's value by these arguments."""
        return vars(args)[self.argument] if self._read is None else self._read(args)


class Settled:
    """An attribute that is settled when a trainer is made, and that nobody looks at later. Setting another value raises
    AttributeError, and says what to do instead."""

    def __init__(self, read: Callable[[Any], Any], instead: str):
        self._read, self._instead = read, instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        return self if trainer is None else self._read(trainer)

    def __set__(self, trainer: Any, value: Any) -> None:
        if "parts" in vars(trainer) and value is not self._read(trainer) and value != self._read(trainer):
            raise AttributeError(f"{self._name} was set on the trainer, which does not read it again. {self._instead}")


def kept_of(kind: type) -> dict[str, Kept]:
    """The kept attributes of a class of trainers, by name."""
    return {
        name: value for base in reversed(kind.__mro__) for name, value in vars(base).items() if isinstance(value, Kept)
    }


def read_once(trainer: Any) -> dict[str, Any]:
    """The arguments that a trainer reads when it is made and not again, with their values as they are now."""
    names = [kept.argument for kept in kept_of(type(trainer)).values()] + ["per_device_train_batch_size"]
    return {name: vars(trainer.args)[name] for name in names}


def warn_of_changes(trainer: Any, then: dict[str, Any]) -> None:
    """Warn of arguments that have been changed since a trainer has read them."""
    if names := [name for name, value in read_once(trainer).items() if value != then[name]]:
        warnings.warn(
            f"{', '.join(names)}: the arguments were changed after the trainer was made. As in TRL, it goes by those "
            f"that it was made with{_instead(trainer, names)}.",
            stacklevel=4,
        )


def _instead(trainer: Any, names: list[str]) -> str:
    kept = [name for name, kept in kept_of(type(trainer)).items() if kept.argument in names and name[0] != "_"]
    return f"; what counts is trainer.{kept[0]}" if kept else ": make another one"


def check_kept(trainer: Any) -> None:
    """Raise ValueError for a value set on a trainer that the arguments refuse, in their words."""
    found = {kept.argument: getattr(trainer, name) for name, kept in kept_of(type(trainer)).items()}
    args = copy.copy(trainer.args)
    vars(args).update(found)
    args.check()


def check_same_rows(then: Task, now: Task, *, in_train: bool, config: str) -> None:
    """Raise ValueError where another task asks for other rows than those that a run has, or for another layout of the
    step that is under way."""
    if then.columns != now.columns:
        raise ValueError(
            "What was set on the trainer since it was made asks for rows of the columns "
            f"{', '.join(now.columns.texts)}, and they were prepared as {', '.join(then.columns.texts)}. Say it in "
            f"{config}."
        )
    if in_train and now.head == "lm" and then.by_micro_batch != now.by_micro_batch:
        raise ValueError(
            "What was set on the trainer while it trains asks for another layout of its steps. Set it before train(), "
            f"or say it in {config}."
        )
