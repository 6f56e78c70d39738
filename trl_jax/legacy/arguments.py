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
from trl_jax.config.renamed import GONE_FROM_TRL, NO_REPLACEMENT, RENAMED, translate_old_names, way_out

# Flags


def modern_flags(flags: list[str], names: Iterable[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Translate old names of flags, such as `--warmup_ratio 0.1`, as `translate_old_names` does for keyword arguments.

    Args:
        flags: the command line.
        names: the current names, with underscores.

    Returns:
        The flags, translated ones last; environment variables to set; and a warning for each old name.

    Raises:
        TypeError: as `translate_old_names`.
    """
    names, current, old = set(names), [], {}
    values: dict[str, Any] = {}
    for name, words in _split_flags(flags):
        name, words = _rewrite_negation(name, words, names)
        if name in RENAMED and name not in names:
            old[name] = _parse_value(words)
        else:
            current += words
            values |= {} if name is None else {name: _parse_value(words)}
    if not has_training_arguments(names):
        return flags, {}, []
    if not old:
        return current, {}, []
    renamed, environment, notes = translate_old_names(values | old, names)
    changed = {name: value for name, value in renamed.items() if name not in values or value != values[name]}
    added = [text for name, value in changed.items() for text in (f"--{name}", _to_text(value))]
    return current + added, environment, notes


def has_training_arguments(names: Iterable[str]) -> bool:
    """Whether a parser with these names has training arguments."""
    return "output_dir" in names


def _split_flags(flags: list[str]) -> list[tuple[str | None, list[str]]]:
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


def _rewrite_negation(name: str | None, words: list[str], names: set[str]) -> tuple[str | None, list[str]]:
    """Turn `--no_x` into `--x false`. A parser has `--no_x` only if x defaults to True, and some defaults changed."""
    if name is None or name in names or not name.startswith("no_") or name[3:] not in names or len(words) > 1:
        return name, words
    return (name, words) if "=" in words[0] else (name[3:], [f"--{name[3:]}", "false"])


def _to_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _parse_value(words: list[str]) -> Any:
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
        moved, accepted: the names of arguments, as in `trainer.arguments.accepting_old_keywords`.

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
        for note in translate_old_names({name: kwargs.pop(name)}, ())[2]:
            tell(note, above=1)
    if old_values := {name: kwargs.pop(name) for name in sorted(moved) if name in kwargs}:
        args, kwargs = _set_in_config(trainer.config_class, old_values, args, kwargs, list(accepted).index("args") - 1)
    for name in kwargs.keys() - accepted.keys():
        raise TypeError(f"{trainer.__name__} has no argument {name!r}: {way_out(name, accepted)}")
    return args, kwargs


def moved_arguments(trainer: type) -> frozenset[str]:
    """Names of arguments that a trainer's constructor accepts and sets in its config."""
    return trainer.__init__.moved


def is_ignored_argument(trainer: type, name: str) -> bool:
    """Whether a trainer's constructor ignores an argument of earlier releases, with a warning."""
    return name in _GONE - moved_arguments(trainer)


def _set_in_config(
    cls: type[BaseConfig], old_values: dict[str, Any], args: tuple, kwargs: dict[str, Any], index: int
) -> tuple[tuple, dict[str, Any]]:
    """The trainer's arguments, with the values set on a copy of its config. index: position of the config in `args`."""
    names = [f.name for f in fields(cls)]
    values, _, _ = translate_old_names(old_values, names)
    config = args[index] if len(args) > index else kwargs.get("args")
    written = ", ".join(f"{name}={value!r}" for name, value in values.items())
    if config is None:
        raise TypeError(f"{written} is an argument of {cls.__name__} now: pass args={cls.__name__}({written}).")
    changed = copy.copy(config if isinstance(config, cls) else from_training_arguments(config, cls))
    for name, value in values.items():
        setattr(changed, name, value)
    for old in old_values:
        new = translate_old_names({old: old_values[old]}, names)[0]
        tell(f"{old} is an argument of {cls.__name__} now: use {cls.__name__}({', '.join(new)}=...).", above=2)
    if len(args) > index:
        return (*args[:index], changed, *args[index + 1 :]), kwargs
    return args, kwargs | {"args": changed}


def from_training_arguments(args: TrainingArguments, cls: type[BaseConfig]) -> BaseConfig:
    """Convert TrainingArguments, which scripts for early TRL pass, to `cls`.

    Raises:
        TypeError: args is something else.
    """
    if isinstance(args, type) and issubclass(args, TrainingArguments):
        raise TypeError(f"args is the class {args.__name__} itself: pass args={cls.__name__}(...).")
    if not isinstance(args, TrainingArguments) or isinstance(args, BaseConfig):
        raise TypeError(f"args must be a {cls.__name__}, got a {type(args).__module__}.{type(args).__qualname__}.")
    warnings.warn(
        f"args is a TrainingArguments: its values are used, with {cls.__name__}'s defaults for the rest. Pass a "
        f"{cls.__name__}.",
        FutureWarning,
        stacklevel=5,
    )
    names = {f.name for f in fields(cls) if f.init}
    return cls(**{f.name: getattr(args, f.name) for f in fields(args) if f.name in names and f.init})


def tell(text: str, above: int = 0) -> None:
    """Issue a FutureWarning at the line that calls a wrapped constructor.

    Args:
        above: number of functions between the wrapper and the caller of this function.
    """
    warnings.warn(text, FutureWarning, stacklevel=3 + above)
