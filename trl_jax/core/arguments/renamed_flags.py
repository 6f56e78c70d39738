"""Old names of arguments on command lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from trl_jax.core.arguments.renamed import RENAMED, translated


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
