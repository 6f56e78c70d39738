"""Render chat templates within limits of size: they come from anyone, and one line can ask for all memory there is.

jinja2's sandbox lets us check sums, products and powers before they are computed, and the text as it grows. The results
of filters and of string methods can be checked only once they exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

MAX_CHARACTERS = 2**27  # of a rendered text, and items of a list
_MAX_BITS = 2**16  # of a whole number
_PIECES = 2**12  # of text, joined at once


class TooLarge(jinja2.TemplateError):
    """A template makes a text of more than `MAX_CHARACTERS`, or a number of more than 65,536 bits."""


def _check(size: int, maximum: int) -> None:
    if size > maximum:
        raise TooLarge(f"more than {maximum:,}")


def _joined(pieces: Iterable[str]) -> str:
    pieces, found, size = iter(pieces), [], 0
    while some := list(islice(pieces, _PIECES)):
        found.append("".join(some))
        size += len(found[-1])
        _check(size, MAX_CHARACTERS)
    return "".join(found)


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Raise TooLarge where the result of an operator would be."""
    sequences, whole = (str, bytes, list, tuple), isinstance(left, int) and isinstance(right, int)
    if operator == "+" and isinstance(left, sequences) and isinstance(right, sequences):
        _check(len(left) + len(right), MAX_CHARACTERS)
    elif operator == "*" and isinstance(left, sequences) and isinstance(right, int):
        _check(len(left) * right, MAX_CHARACTERS)
    elif operator == "*" and isinstance(right, sequences) and isinstance(left, int):
        _check(len(right) * left, MAX_CHARACTERS)
    elif operator == "*" and whole:
        _check(left.bit_length() + right.bit_length(), _MAX_BITS)
    elif operator == "**" and whole:
        _check(left.bit_length() * right, _MAX_BITS)


class _Bounded(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**"})
    concat = staticmethod(_joined)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)


def apply_chat_template(tokenizer: Any, messages: list[dict], **options: Any) -> Any:
    """Call `tokenizer.apply_chat_template(messages, **options)` with limits of size.

    Raises:
        TooLarge: the template makes more than the limits.
    """
    with _bounded():
        return tokenizer.apply_chat_template(messages, **options)


def render(
    template: str, messages: list[dict], *, spans: bool = False, **variables: Any
) -> tuple[str, list[tuple[int, int]]]:
    """The text of messages, with the same limits and, if asked for, its spans within `{% generation %}`."""
    with _bounded():
        texts, found = chat_template_utils.render_jinja_template(
            [messages], chat_template=template, return_assistant_tokens_mask=spans, **variables
        )
    return texts[0], found[0] if spans else []


@contextmanager
def _bounded() -> Iterator[None]:
    """transformers looks up the class of jinja2's environment while it compiles a template, and caches it."""
    chat_template_utils.ImmutableSandboxedEnvironment = _Bounded
    try:
        yield
    finally:
        chat_template_utils.ImmutableSandboxedEnvironment = ImmutableSandboxedEnvironment
