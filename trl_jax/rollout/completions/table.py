"""Shows completions in the terminal, as TRL's table: a row each, with its rewards."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trl_jax.core.printable import printable

_STYLES = {"role": "bold red", "thought": "italic dim white", "image": "bold cyan", "": ""}


def print_completions(
    table: Mapping[str, list], rewards: Sequence[str], step: int, num_samples: int | None = None
) -> None:
    """Print a table where rich is installed.

    Args:
        table: columns of equal length: step, prompt, completion, one for each of `rewards`, further ones, advantage
            where there is one.
        num_samples: how many rows, drawn at random; None or more than there are: all, in order.
    """
    if importlib.util.find_spec("rich") is None or num_samples == 0:
        return
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    extra = [name for name in table if name not in ("step", "prompt", "completion", "advantage", *rewards)]
    shown = Table(show_header=True, header_style="bold white", expand=True)
    shown.add_column("Prompt", style="bright_yellow")
    shown.add_column("Completion", style="bright_green")
    for name in rewards:
        shown.add_column(Text(printable(name)), style="bold cyan", justify="right")
    measured = [*rewards, *(name for name in ("advantage",) if name in table)]
    if "advantage" in table:
        shown.add_column("Advantage", style="bold magenta", justify="right")
    for name in extra:
        shown.add_column(Text(printable(name)), style="bright_white")

    def cell(value: Any) -> Text:
        return Text.assemble(*((printable(text), _STYLES[kind]) for text, kind in _pieces(value)))

    for row in _drawn(len(table["prompt"]), num_samples):
        numbers = [f"{table[name][row]:.2f}" for name in measured]
        texts = [cell(table[name][row]) for name in ("prompt", "completion")]
        shown.add_row(*texts, *numbers, *(cell(table[name][row]) for name in extra))
        shown.add_section()
    Console().print(Panel(shown, expand=False, title=f"Step {step}", border_style="bold white"))


def _drawn(rows: int, num_samples: int | None) -> Sequence[int]:
    """From Python's global generator, as in TRL."""
    if num_samples is None or num_samples >= rows:
        return range(rows)
    return random.sample(range(rows), num_samples)


def _pieces(value: Any) -> Iterator[tuple[str, str]]:
    """The text of a cell in pieces, each with its kind: messages with their roles, anything else as it is."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        yield str(value), ""
        return
    for number, message in enumerate(value):
        yield ("\n\n" if number else "") + f"{str(message.get('role', '')).upper()}\n", "role"
        if thought := message.get("reasoning_content") or message.get("thinking"):
            yield f"{thought}\n", "thought"
        yield from _content(message.get("content"))
        calls = message.get("tool_calls") or []
        yield "\n".join(map(_call, calls if isinstance(calls, list) else [calls])), ""


def _content(content: Any) -> Iterator[tuple[str, str]]:
    """Text and blocks as TRL shows them, and any other items of a list that a tool has returned."""
    if not isinstance(content, list):
        yield "" if content is None else str(content), ""
        return
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            yield str(block.get("text", "")), ""
        elif kind == "image":
            yield "[IMAGE]", "image"
        elif not isinstance(block, dict):
            yield f"{block}\n", ""


def _call(call: Any) -> str:
    """A call as Python would write it; one that the model wrote in another form as it is."""
    function = call.get("function", {}) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return str(call)
    given = function.get("arguments", {})
    if isinstance(given, str):
        with contextlib.suppress(ValueError, RecursionError):
            given = json.loads(given)
    texts = [f"{name}={value!r}" for name, value in given.items()] if isinstance(given, dict) else [str(given)]
    return f"{function.get('name', '?')}({', '.join(texts)})"
