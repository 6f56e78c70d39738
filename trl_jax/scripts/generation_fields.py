"""Fields of transformers' GenerationConfig as flags of a command."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from trl_jax.core.secrets import CleanParser

_SWITCHES = ("do_sample", "renormalize_logits", "remove_invalid_values", "use_cache")  # alone, such a flag means true


class FieldsParser(CleanParser):
    """A parser whose commands take any field beside their own flags."""

    def __init__(self, **options: Any):
        example = "--do_sample --temperature 0.7 --max_new_tokens 256 --stop_strings '[\"END\"]'"
        epilog = f"Any field of transformers' GenerationConfig is a flag, too, as in {example}."
        super().__init__(epilog=epilog, allow_abbrev=False, **options)

    def parse_both(self, argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The command's own arguments, and the fields.

        Raises:
            ValueError: a flag that is neither.
        """
        fields, rest = _taken(argv, self._option_string_actions)
        return vars(self.parse_args(rest)), fields


def _taken(argv: Sequence[str], own: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """The fields among the arguments, and the others. A value is JSON, or text."""
    from transformers import GenerationConfig

    known = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    fields, rest, left = {}, [], list(argv)
    while left:
        argument = left.pop(0)
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or flag in own:
            rest.append(argument)
            continue
        if name not in known:
            raise ValueError(f"{flag} is neither a flag nor a field of GenerationConfig.{_near(name, known)}")
        if name in _SWITCHES and not equals and (not left or left[0].lower() not in ("true", "false")):
            value = "true"
        elif not equals:
            if not left:
                raise ValueError(f"{flag} has no value.")
            value = left.pop(0)
        fields[name] = _value(name, value)
    return fields, rest


def _value(name: str, text: str) -> Any:
    if text.lower() in ("true", "false", "none", "null"):
        return {"true": True, "false": False}.get(text.lower())
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return float(value) if isinstance(value, int) and name in _floats() else value


def _floats() -> set[str]:
    """Fields that transformers wants to be no whole number, as in temperature=2.0."""
    from trl_jax.generation.options import Options

    return {field.name for field in dataclasses.fields(Options) if field.type == "float | None"}


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean --{near[0]}?" if near else ""
