"""Chat templates, which may come from anyone, rendered within bounds: a line of one can ask for all memory there is.

jinja2's sandbox lets products, powers and sums be looked at before they are computed, and the text as it grows. What
filters and methods of strings make is seen only when it is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

MOST_CHARACTERS = 2**27  # of a rendered text, and items of a list
_MOST_BITS = 2**16  # of a whole number
_PIECES = 2**12  # that are joined at once


class TooLarge(jinja2.TemplateError):
    """A template makes more than `MOST_CHARACTERS`."""


def _check(size: int, most: int) -> None:
    if size > most:
        raise TooLarge(f"more than {most:,}")


def _joined(pieces: Iterable[str]) -> str:
    pieces, found, size = iter(pieces), [], 0
    while some := list(islice(pieces, _PIECES)):
        found.append("".join(some))
        size += len(found[-1])
        _check(size, MOST_CHARACTERS)
    return "".join(found)


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Raise TooLarge where the result would be."""
    sequences, whole = (str, bytes, list, tuple), isinstance(left, int) and isinstance(right, int)
    if operator == "+" and isinstance(left, sequences) and isinstance(right, sequences):
        _check(len(left) + len(right), MOST_CHARACTERS)
    elif operator == "*" and isinstance(left, sequences) and isinstance(right, int):
        _check(len(left) * right, MOST_CHARACTERS)
    elif operator == "*" and isinstance(right, sequences) and isinstance(left, int):
        _check(len(right) * left, MOST_CHARACTERS)
    elif operator == "*" and whole:
        _check(left.bit_length() + right.bit_length(), _MOST_BITS)
    elif operator == "**" and whole:
        _check(left.bit_length() * right, _MOST_BITS)


class _Bounded(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**"})
    concat = staticmethod(_joined)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)


def apply_chat_template(tokenizer: Any, messages: list[dict], **how: Any) -> Any:
    """`tokenizer.apply_chat_template`, of what is not too large.

    transformers makes its environment while it compiles a template, of the class of this name, and keeps it.

    Raises:
        TooLarge: what the template asks for, or makes, is.
    """
    chat_template_utils.ImmutableSandboxedEnvironment = _Bounded
    try:
        return tokenizer.apply_chat_template(messages, **how)
    finally:
        chat_template_utils.ImmutableSandboxedEnvironment = ImmutableSandboxedEnvironment
