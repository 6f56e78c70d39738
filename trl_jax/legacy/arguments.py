"""Accept argument names and constructors of TRL before 1.0 and transformers before 5, with a FutureWarning."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Protocol

from transformers import TrainingArguments

from trl_jax.config.base import BaseConfig
from trl_jax.config.renamed import GONE_FROM_TRL, NO_REPLACEMENT, RENAMED, translated, way_out

# Flags


def modern_flags(flags: list[str], known: Iterable[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Translate old names of flags, such as `--warmup_ratio 0.1`, as `translated` does for keyword arguments.

    Args:
        flags: the command line.
        known: the current names, with underscores.

    Returns:
        The flags, translated ones last; environment variables to set; and a warning for each old name.

    Raises:
        TypeError: as `translated`.
    """
    known, kept, old = set(known), [], {}
    given: dict[str, Any] = {}
    for name, words in _split(flags):
        name, words = _without_negation(name, words, known)
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
    """Whether a parser with these names has training arguments."""
    return "output_dir" in known


def _split(flags: list[str]) -> list[tuple[str | None, list[str]]]:
    """Split into (name, flag and its values). The name is None for values before the first flag."""
    parts: list[tuple[str | None, list[str]]] = []
    for word in flags:
        if word.startswith("--"):
            parts.append((word[2:].partition("=")[0].replace("-", "_"), [word]))
        elif parts:
            parts[-1][1].append(word)
        else:
            parts.append((None, [word]))
    return parts


def _without_negation(name: str | None, words: list[str], known: set[str]) -> tuple[str | None, list[str]]:
    """Turn `--no_x` into `--x false`. A parser has `--no_x` only if x defaults to True, and some defaults changed."""
    if name is None or name in known or not name.startswith("no_") or name[3:] not in known or len(words) > 1:
        return name, words
    return (name, words) if "=" in words[0] else (name[3:], [f"--{name[3:]}", "false"])


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _value(words: list[str]) -> Any:
    """Parse the value of a flag: a boolean, None, or text. A flag without a value means True."""
    _, equals, first = words[0].partition("=")
    values = ([first] if equals else []) + words[1:]
    if not values:
        return True
    text = " ".join(values)
    return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), text)


# Fields of RLOOConfig up to TRL 0.21 that are not just renamed


class OldArguments(Protocol):
    """The arguments that `warn` and `resolve_steps` use."""

    missing_eos_penalty: float | None
    total_episodes: int | None
    max_steps: int
    num_iterations: int
    generation_batch_size: int
    steps_per_generation: int
    gradient_accumulation_steps: int


def warn(args: OldArguments, stacklevel: int) -> None:
    """Warn about the fields that are set.

    Args:
        stacklevel: of the line that creates the config, relative to the caller of this function.
    """
    if args.missing_eos_penalty is not None:
        penalty = float(args.missing_eos_penalty)
        text = (
            f"missing_eos_penalty={penalty:g} is an argument of TRL up to 0.21. It still works: it is subtracted from "
            "the reward of a completion without an EOS token. Use a reward function for this."
        )
        warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)
    if args.total_episodes is not None:
        text = (
            f"total_episodes={args.total_episodes} is an argument of TRL up to 0.21. It still works: it sets max_steps "
            "so that as many completions are generated. Use max_steps, or num_train_epochs."
        )
        warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)


def resolve_steps(args: OldArguments) -> None:
    """Set max_steps from total_episodes. A generation takes steps_per_generation * num_iterations micro-batches."""
    generations = -(-args.total_episodes // args.generation_batch_size)
    micro_batches = generations * args.steps_per_generation * args.num_iterations
    args.max_steps = -(-micro_batches // args.gradient_accumulation_steps)


# Arguments of trainers

_GONE = {*GONE_FROM_TRL.split(), *NO_REPLACEMENT}


def modern_keywords(
    trainer: type, moved: frozenset[str], accepted: Mapping[str, Any], args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Translate arguments of earlier releases: `tokenizer=`, those that have moved to the config, and those that no
    trainer needs any more. Each gets a FutureWarning at the line that creates the trainer.

    Args:
        moved, accepted: the names of arguments, as in `trainer.overrides.accepting_old_keywords`.

    Raises:
        TypeError: an argument is unknown.
    """
    kwargs = dict(kwargs)
    if "tokenizer" in kwargs:
        if "processing_class" in kwargs:
            raise TypeError("tokenizer and processing_class are the same argument. Remove tokenizer.")
        kwargs["processing_class"] = kwargs.pop("tokenizer")
        tell("tokenizer is an old name: use processing_class.", above=1)
    for name in (kwargs.keys() & _GONE) - moved - accepted.keys():
        for note in translated({name: kwargs.pop(name)}, ())[2]:
            tell(note, above=1)
    if given := {name: kwargs.pop(name) for name in sorted(moved) if name in kwargs}:
        args, kwargs = _with_moved(trainer.config_class, given, args, kwargs, list(accepted).index("args") - 1)
    for name in kwargs.keys() - accepted.keys():
        raise TypeError(f"{trainer.__name__} has no argument {name!r}: {way_out(name, accepted)}")
    return args, kwargs


def moved_arguments(trainer: type) -> frozenset[str]:
    """Names of arguments that a trainer's constructor accepts and sets in its config."""
    return trainer.__init__.moved


def left_out(trainer: type, name: str) -> bool:
    """Whether a trainer's constructor ignores an argument of earlier releases, with a warning."""
    return name in _GONE - moved_arguments(trainer)


def _with_moved(
    kind: type[BaseConfig], given: dict[str, Any], args: tuple, kwargs: dict[str, Any], at: int
) -> tuple[tuple, dict[str, Any]]:
    """The trainer's arguments, with the values set on a copy of its config. at: position of the config in `args`."""
    names = [f.name for f in fields(kind)]
    now, _, _ = translated(given, names)
    config = args[at] if len(args) > at else kwargs.get("args")
    written = ", ".join(f"{name}={value!r}" for name, value in now.items())
    if config is None:
        raise TypeError(f"{written} is an argument of {kind.__name__} now: pass args={kind.__name__}({written}).")
    changed = copy.copy(config if isinstance(config, kind) else from_training_arguments(config, kind))
    for name, value in now.items():
        setattr(changed, name, value)
    for old in given:
        new = translated({old: given[old]}, names)[0]
        tell(f"{old} is an argument of {kind.__name__} now: use {kind.__name__}({', '.join(new)}=...).", above=2)
    if len(args) > at:
        return (*args[:at], changed, *args[at + 1 :]), kwargs
    return args, kwargs | {"args": changed}


def from_training_arguments(args: TrainingArguments, kind: type[BaseConfig]) -> BaseConfig:
    """Convert TrainingArguments, which scripts for early TRL pass, to `kind`.

    Raises:
        TypeError: args is something else.
    """
    if isinstance(args, type) and issubclass(args, TrainingArguments):
        raise TypeError(f"args is the class {args.__name__} itself: pass args={kind.__name__}(...).")
    if not isinstance(args, TrainingArguments) or isinstance(args, BaseConfig):
        raise TypeError(f"args must be a {kind.__name__}, got a {type(args).__module__}.{type(args).__qualname__}.")
    warnings.warn(
        f"args is a TrainingArguments: its values are used, with {kind.__name__}'s defaults for the rest. Pass a "
        f"{kind.__name__}.",
        FutureWarning,
        stacklevel=5,
    )
    known = {f.name for f in fields(kind) if f.init}
    return kind(**{f.name: getattr(args, f.name) for f in fields(args) if f.name in known and f.init})


def tell(text: str, above: int = 0) -> None:
    """Issue a FutureWarning at the line that calls a wrapped constructor.

    Args:
        above: number of functions between the wrapper and the caller of this function.
    """
    warnings.warn(text, FutureWarning, stacklevel=3 + above)
