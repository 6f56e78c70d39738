"""Formats the help of parsers with a hundred flags: each flag once, with a short word for its value, at any width."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from trl_jax.core.secrets import masked

WORDS: dict[str, str] = {"int": "INT", "float": "NUMBER", "string_to_bool": "BOOL"}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap each paragraph, but for an indented one: an example keeps its lines."""
        fill = super()._fill_text
        parts = text.split("\n\n")
        return "\n\n".join(part if part.startswith(" ") else fill(part, width, indent) for part in parts)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        spellings: dict[str, str] = {}  # --max_length and --max-length are one
        for flag in action.option_strings:
            spellings.setdefault(flag.replace("-", "_"), flag)
        flags = ", ".join(spellings.values())
        if not flags or action.nargs == 0:
            return flags or super()._format_action_invocation(action)
        return f"{flags} {_value_word(action)}"

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        if masked(action.default, action.dest) != action.default:  # a secret in a YAML file
            return action.help
        return super()._get_help_string(action)


def _value_word(action: argparse.Action) -> str:
    word = action.metavar or _choices(action) or WORDS.get(_type_name(action.type), "TEXT")
    if action.nargs == "?":
        return f"[{word}]"
    return f"{word} ..." if action.nargs == "+" else str(word)


def _choices(action: argparse.Action) -> str | None:
    joined = "{" + ",".join(map(str, action.choices or ())) + "}"
    return joined if 2 < len(joined) <= 40 else None


def _type_name(kind: Callable | None) -> str:
    return "" if kind is None else kind.__name__
