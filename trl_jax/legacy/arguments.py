"""Argument names of TRL before 1.0 and of transformers before 5."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, Protocol

from transformers import TrainingArguments

from trl_jax.config.base import BaseConfig
from trl_jax.config.renamed import GONE_FROM_TRL, OTHERWISE, RENAMED, translated, way_out

# ----------------------------------------------------------------------------------------------------
# Old names of arguments on command lines.


def modern_flags(flags: list[str], known: Iterable[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Translate old names of flags, `--warmup_ratio 0.1` and `--warmup-ratio=0.1`, as `translated` does those of
    keyword arguments.

    Args:
        flags: of a command line.
        known: today's names, with underscores.

    Returns:
        The flags, those that were translated last; environment variables to set; and a warning for each old name.

    Raises:
        TypeError: as `translated`.
    """
    known, kept, old = set(known), [], {}
    given: dict[str, Any] = {}
    for name, words in _split(flags):
        name, words = _denied(name, words, known)
        if name in RENAMED and name not in known:
            old[name] = words
        else:
            kept += words
            given |= {} if name is None else {name: _value(words)}
    if not is_of_training(known):
        return flags, {}, []
    if not old:
        return kept, {}, []
    now, environment, notes = translated(given | {name: _value(words) for name, words in old.items()}, known)
    changed = {name: value for name, value in now.items() if name not in given or value != given[name]}
    new = [text for name, value in changed.items() for text in (f"--{name}", _text(value))]
    return kept + new, environment, notes


def is_of_training(known: Iterable[str]) -> bool:
    """Whether a parser with these names has a trainer's arguments, whose old names are known."""
    return "output_dir" in known


def _split(flags: list[str]) -> list[tuple[str | None, list[str]]]:
    """The flags, each with its values, by name; None for values in front of the first."""
    parts: list[tuple[str | None, list[str]]] = []
    for word in flags:
        if word.startswith("--"):
            parts.append((word[2:].partition("=")[0].replace("-", "_"), [word]))
        elif parts:
            parts[-1][1].append(word)
        else:
            parts.append((None, [word]))
    return parts


def _denied(name: str | None, words: list[str], known: set[str]) -> tuple[str | None, list[str]]:
    """`--no_something` as `--something false`: parsers have that flag where the default is true, which was once."""
    if name is None or name in known or not name.startswith("no_") or name[3:] not in known or len(words) > 1:
        return name, words
    return (name, words) if "=" in words[0] else (name[3:], [f"--{name[3:]}", "false"])


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _value(words: list[str]) -> Any:
    """The value of a flag: text, but for truths and None; a flag without a value means True."""
    _, equals, first = words[0].partition("=")
    values = ([first] if equals else []) + words[1:]
    if not values:
        return True
    text = " ".join(values)
    return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), text)


# ----------------------------------------------------------------------------------------------------
# Fields that TRL's RLOOConfig had up to 0.21, whose meaning needs more than another name.


class OldArguments(Protocol):
    """The arguments that these fields are settled with."""

    missing_eos_penalty: float | None
    total_episodes: int | None
    max_steps: int
    num_iterations: int
    generation_batch_size: int
    steps_per_generation: int
    gradient_accumulation_steps: int


def warn(args: OldArguments, stacklevel: int) -> None:
    """Warn of those that are set.

    Args:
        stacklevel: of the line that made the config, counted from the caller of this function.
    """
    if args.missing_eos_penalty is not None:
        text = (
            f"missing_eos_penalty={args.missing_eos_penalty:g} is of TRL up to 0.21, and honoured: a reward function "
            "takes it off where a completion has no end of text. Write such a function."
        )
        warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)
    if args.total_episodes is not None:
        text = (
            f"total_episodes={args.total_episodes} is of TRL up to 0.21, and honoured: so many completions are "
            "written, and max_steps follows from it. Use max_steps, or num_train_epochs."
        )
        warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)


def settle_steps(args: OldArguments) -> None:
    """Set max_steps by the completions that are written in all: each generation is as many steps as it is cut into,
    times num_iterations."""
    if args.total_episodes is None:
        return
    generations = -(-args.total_episodes // args.generation_batch_size)
    micro_batches = generations * args.steps_per_generation * args.num_iterations
    args.max_steps = -(-micro_batches // args.gradient_accumulation_steps)


# ----------------------------------------------------------------------------------------------------
# Arguments of trainers by the names they had, and the class of `args` they took, in earlier releases of TRL.


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
