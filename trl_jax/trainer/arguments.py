"""The arguments of a trainer: checks of what its constructor gets, and attributes with the values of its config."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial, wraps
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import TrainingArguments

from trl_jax.config.base import BaseConfig
from trl_jax.core.text import hide_frames
from trl_jax.tasks.task import Task

# The constructor.


def refuse(**arguments: Any) -> None:
    """Raise ValueError if an unsupported argument is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} is not in this release of trl_jax. Leave it out.")


def accepting_old_keywords(*moved: str, first: Callable | None = None) -> Callable[[Callable], Callable]:
    """Make a trainer's `__init__` check its arguments, and accept old ones with a FutureWarning.

    Args:
        moved: names, old or current, of arguments that have moved to the config.
        first: (trainer, args, kwargs) -> kwargs, which translates the arguments of an old constructor.
    """
    return partial(_accepting, frozenset(moved), first)


def _accepting(moved: frozenset[str], first: Callable | None, init: Callable) -> Callable:
    accepted = inspect.signature(init).parameters
    order = list(accepted)[1:]  # without self

    @wraps(init)
    def wrapped(self, *args: Any, **kwargs: Any) -> None:
        try:
            if first is not None:
                kwargs = first(self, args, kwargs)
            check_places(type(self).__name__, order, dict(zip(order, args, strict=False)) | kwargs)
            if not kwargs.keys() <= accepted.keys():
                from trl_jax.legacy.arguments import modern_keywords

                args, kwargs = modern_keywords(type(self), moved, accepted, args, kwargs)
            init(self, *args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    wrapped.moved = moved
    return wrapped


def as_config(args: TrainingArguments, kind: type[BaseConfig]) -> BaseConfig:
    """`args`, converted to `kind` if it is a TrainingArguments, which scripts for early TRL pass.

    Raises:
        TypeError: args is neither.
    """
    if isinstance(args, kind):
        return args
    from trl_jax.legacy.arguments import from_training_arguments

    return from_training_arguments(args, kind)


def check_places(trainer: str, order: Sequence[str], passed: Mapping[str, Any]) -> None:
    """Raise TypeError for a config, a dataset or a tokenizer that was passed as the wrong argument.

    Args:
        trainer: the name of the class.
        order: the names of its positional arguments, in order.
        passed: the arguments that were passed, by name.
    """
    module = sys.modules.get("transformers.tokenization_utils_base")  # without it, there can be no tokenizer
    places = {
        TrainingArguments: ("args",),
        Dataset | IterableDataset | DatasetDict | IterableDatasetDict: ("train_dataset", "eval_dataset"),
        () if module is None else module.PreTrainedTokenizerBase: ("processing_class", "reward_processing_classes"),
    }
    for name, value in passed.items():
        for kind, (place, *others) in places.items():
            if isinstance(value, kind) and name in order and name not in (place, *others):
                until = ", ".join(order[: order.index(place) + 1])
                raise TypeError(
                    f"{name} of {trainer} is a {type(value).__name__}. Pass it as {place}=: by position, the arguments "
                    f"are {until} and so on, as in TRL."
                )


def check_config(trainer: type, base: type, optional: Collection[str] = ()) -> None:
    """Raise TypeError if a trainer's config class lacks fields of `base`, other than the `optional` ones."""
    names = {field.name for field in fields(trainer.config_class)}
    missing = [field.name for field in fields(base) if field.name not in {*names, *optional}]
    if missing:
        raise TypeError(
            f"config_class of {trainer.__name__} is {trainer.config_class.__name__}, which has no field "
            f"{', '.join(missing)}: wanted a dataclass derived from {base.__name__}."
        )


# Attributes. TRL's losses read them in each step.


class MirroredArg:
    """A trainer attribute that is initialized from an argument and used instead of it from then on.

    A script may set it at any time: `make_task` reads the attribute, and the step is rebuilt if the task changes. A
    value set before `super().__init__` is overwritten there, as in TRL.
    """

    def __init__(self, argument: str | None = None, read: Callable[[Any], Any] | None = None):
        """
        Args:
            argument: the name of the argument; None: the attribute's.
            read: computes the attribute from the arguments; None: it is the value of `argument`.
        """
        self.argument, self._read = argument, read

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, self.argument = name, self.argument or name
        self.__doc__ = f"`args.{self.argument}`, or what was set since."

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        mirrored = vars(trainer)["_argument_values"].mirrored if "_argument_values" in vars(trainer) else {}
        return mirrored[self._name] if self._name in mirrored else self.of(trainer.args)

    def __set__(self, trainer: Any, value: Any) -> None:
        if "_argument_values" in vars(trainer):
            trainer._argument_values.mirrored[self._name] = value

    def of(self, args: Any) -> Any:
        """The attribute's initial value for these arguments."""
        return getattr(args, self.argument) if self._read is None else self._read(args)


class InitOnlyAttribute:
    """A trainer attribute whose value follows from the constructor. Setting another one later raises AttributeError,
    which says what to do instead."""

    def __init__(self, read: Callable[[Any], Any], instead: str):
        """
        Args:
            read: trainer -> the value.
            instead: a sentence.
        """
        self._read, self._instead = read, instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        return self if trainer is None else self._read(trainer)

    def __set__(self, trainer: Any, value: Any) -> None:
        if "parts" not in vars(trainer):
            return  # set before super().__init__, which overwrites it, as in TRL
        if value is not self._read(trainer) and value != self._read(trainer):
            raise self.error(type(trainer))

    def error(self, kind: type) -> AttributeError:
        """The error for a trainer of this class."""
        instead = self.instead(kind)
        return AttributeError(f"{self._name} was set on the trainer, which does not read it again. {instead}")

    def instead(self, kind: type) -> str:
        return self._instead


class InitOnlyArg(InitOnlyAttribute):
    """A trainer attribute with the value of the argument of the same name, which only the constructor reads."""

    def __init__(self, of: Callable[[Any], Any] | None = None):
        """
        Args:
            of: arguments -> the value; None: the argument.
        """
        super().__init__(lambda trainer: self.of(trainer.args), "")
        self._of = of

    def of(self, args: Any) -> Any:
        return getattr(args, self._name) if self._of is None else self._of(args)

    def __set__(self, trainer: Any, value: Any) -> None:
        super().__set__(trainer, value)
        if "parts" in vars(trainer):
            trainer._argument_values.set_alike[self._name] = value

    def instead(self, kind: type) -> str:
        return f"Set {self._name} in {kind.config_class.__name__}."


class ArgumentValues:
    """The values of a trainer's MirroredArg and InitOnlyArg attributes, by name.

    mirrored: the current values of the former.
    set_alike: what a script has set the latter to, which was the value of the argument at that time.
    """

    def __init__(self, kind: type, args: BaseConfig):
        """Read the arguments for a trainer of this class."""
        self._kind = kind
        self._mirroring: dict[str, MirroredArg] = _attributes(kind, MirroredArg)
        self.mirrored = {name: attribute.of(args) for name, attribute in self._mirroring.items()}
        self.set_alike: dict[str, Any] = {}
        self._read_once, self._init_only = self._current(args), {}

    def _current(self, args: BaseConfig) -> dict[str, Any]:
        """The arguments that are only read in the constructor."""
        names = [attribute.argument for attribute in self._mirroring.values()] + ["per_device_train_batch_size"]
        return {name: getattr(args, name) for name in names}

    def constructed(self, args: BaseConfig) -> None:
        """The constructor has finished, and reads no InitOnlyArg any more."""
        attributes = _attributes(self._kind, InitOnlyArg).items()
        self._init_only = {name: attribute.of(args) for name, attribute in attributes if name in vars(args)}

    def warn_of_changes(self, args: BaseConfig) -> None:
        """Warn about arguments that were changed since the constructor read them."""
        if names := [name for name, value in self._current(args).items() if value != self._read_once[name]]:
            attributes = [name for name, arg in self._mirroring.items() if arg.argument in names and name[0] != "_"]
            instead = f"; set trainer.{attributes[0]} instead" if attributes else ": create a new trainer"
            warnings.warn(
                f"{', '.join(names)}: the arguments were changed after the trainer was made. As in TRL, this has no "
                f"effect{instead}.",
                stacklevel=4,  # the script's line: train() is an api_boundary, which adds a frame
            )

    def check_set_alike(self) -> None:
        """Raise AttributeError if an argument was changed and the trainer's attribute was then set to the same value,
        which the next step would not follow."""
        for name, value in self.set_alike.items():
            if value is not self._init_only[name] and value != self._init_only[name]:
                raise inspect.getattr_static(self._kind, name).error(self._kind)

    def check_mirrored(self, trainer: Any) -> None:
        """Raise the config's ValueError if a value that was set on a trainer is invalid."""
        args = copy.copy(trainer.args)
        vars(args).update({arg.argument: getattr(trainer, name) for name, arg in self._mirroring.items()})
        args.check()


def _attributes(kind: type, of: type) -> dict[str, Any]:
    """The attributes of a trainer class that are of this kind, by name."""
    return {
        name: value for base in reversed(kind.__mro__) for name, value in vars(base).items() if isinstance(value, of)
    }


def check_same_rows(before: Task, now: Task, *, in_train: bool, config: str) -> None:
    """Raise ValueError if a changed task needs rows with other columns, or, during training, another step layout."""
    if before.columns != now.columns:
        raise ValueError(
            "What was set on the trainer since it was made needs rows with the columns "
            f"{', '.join(now.columns.texts)}, but they were prepared with {', '.join(before.columns.texts)}. Set it in "
            f"{config}."
        )
    if in_train and now.head == "lm" and before.whole_micro_batches != now.whole_micro_batches:
        raise ValueError(
            "What was set on the trainer during training needs another layout of its steps. Set it before train(), "
            f"or set it in {config}."
        )
