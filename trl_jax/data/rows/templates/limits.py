"""Limits of what a chat template may make and do: templates come from anyone, and one line can ask for all there is.

Each operation of a template is counted by the size of what goes into it, before it runs. Of the few whose result may be
larger than that, `check_growth` works out the size of the result first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2.utils import Namespace

MAX_CHARACTERS = 2**27  # of a text, and items of a list
MAX_WORK = 2**29  # characters that the operations of one rendering read
ITEM = 64  # characters: a number, an item of a list or a step of a loop counts like so many
CALL = 16 * ITEM  # so does one call
_MAX_PIECES = 2**24  # into which a text is taken apart
_MAX_BITS = 2**16  # of a whole number
_PADS = frozenset(
    "batch center expandtabs indent ljust rjust round slice to_bytes tojson wordwrap zfill".split()
)  # filters and methods that repeat something as often as an argument says
_APART = frozenset(("split", "rsplit", "splitlines", "list"))  # that make a list of a text
_left: ContextVar[int | None] = ContextVar("left", default=None)  # of MAX_WORK; None while nothing is rendered


class TooLarge(jinja2.TemplateError):
    """A template makes a text, a list or a number that is too large, or does more than MAX_WORK."""


def begin() -> None:
    """Count anew: a rendering begins."""
    _left.set(MAX_WORK)


def end() -> None:
    """Count no more: what is compiled from now on belongs to no rendering."""
    _left.set(None)


def check(size: int, maximum: int | None = None) -> None:
    """Raise TooLarge for a size of more than `maximum`, MAX_CHARACTERS if None."""
    maximum = MAX_CHARACTERS if maximum is None else maximum
    if size > maximum:
        raise TooLarge(f"more than {maximum:,}")


def count(size: int) -> None:
    """Take the size of an operation from what is left of MAX_WORK."""
    left = _left.get()
    if left is not None:
        check(size, left)
        _left.set(left - size)


def shallow(value: Any) -> int:
    """The size of a value of which nothing but the items is looked at; of an iterator, which has none, that of one."""
    if isinstance(value, str | bytes):
        return len(value)
    return ITEM * (1 + len(value)) if isinstance(value, list | tuple | dict | set | frozenset | range) else ITEM


def deep(value: Any) -> int:
    """The size of all that is in a value, what is there many times as often; at most a little above MAX_WORK."""
    size, waiting = 0, [value]
    while waiting and size <= MAX_WORK:
        one = waiting.pop()
        size += ITEM
        if isinstance(one, str | bytes):
            size += len(one)
        elif isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
        elif isinstance(one, Namespace):  # whose own attributes are the template's
            waiting += object.__getattribute__(one, "__dict__").values()
    return size


def counted(values: Any) -> Any:
    """The values of a loop, counted at once, or one by one where they are an iterator's."""
    if isinstance(values, Iterator):
        return _one_by_one(values)
    count(shallow(values))
    return values


def items(value: Any) -> Any:
    """The values of a filter, those of an iterator as a list, so that they have a size."""
    return list(_one_by_one(value)) if isinstance(value, Iterator) else value


def _one_by_one(values: Iterator) -> Iterator:
    for value in values:
        count(ITEM)
        yield value


def read(value: Any) -> Any:
    """A value that becomes text or is compared, counted with all that is in it."""
    if isinstance(value, str):
        count(len(value))
    elif not isinstance(value, int | float | None):
        count(deep(value))
    return value


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Raise TooLarge where the result of an operator would be."""
    sequences, whole = (str, bytes, list, tuple), isinstance(left, int) and isinstance(right, int)
    if operator == "+" and isinstance(left, sequences) and isinstance(right, sequences):
        check(len(left) + len(right))
        count(shallow(left) + shallow(right))
    elif operator == "*" and isinstance(left, sequences) and isinstance(right, int):
        check(len(left) * right)
        count(shallow(left) * max(right, 0))
    elif operator == "*" and isinstance(right, sequences) and isinstance(left, int):
        check_operands("*", right, left)
    elif operator == "*" and whole:
        check(left.bit_length() + right.bit_length(), _MAX_BITS)
    elif operator == "**" and whole:
        check(left.bit_length() * right, _MAX_BITS)
    elif operator == "%" and isinstance(left, str | bytes):
        check_growth("format", left, (right,), {})


def check_growth(name: str, value: Any, args: tuple, options: Mapping[str, Any]) -> None:
    """Raise TooLarge where a filter or a method of this name would make too much of a value."""
    given = [*args, *options.values()]
    if name in ("format", "format_map", "strftime_now"):
        check(deep([value, *given]) + _widths(str(value), given))
    elif name in _PADS:
        check(deep(value) * max([_number(one) for one in given], default=1))
    elif name == "replace" and len(given) > 1:
        text, old, new = map(str, (value, *given[:2]))
        check(len(text) + text.count(old) * len(new))
    elif name == "join":
        texts, between = (given[0], value) if isinstance(value, str) and given else (value, [*given, ""][0])
        check(deep(texts) + shallow(texts) // ITEM * len(str(between)))
    elif name == "translate" and isinstance(value, str):
        check(len(value) * deep(given) // ITEM)
    elif name in _APART and isinstance(value, str):
        by = given[0] if name.endswith("split") and given and isinstance(given[0], str) else ""
        check(value.count(by) if by else len(value) // 2, _MAX_PIECES)


def _number(given: Any) -> int:
    """How often an argument may have something repeated: a width, or the characters of a filling."""
    return abs(given) if isinstance(given, int) else len(given) if isinstance(given, str) else 1


def _widths(text: str, given: Iterable[Any]) -> int:
    """How many characters the fields of a format may be padded with: the numbers in it, and for fields that ask for
    them (`*`, `{:{}}`) those among its values."""
    size = sum(int(number[:12]) for number in re.findall(r"\d+", text))
    if "*" in text or re.search(r"{[^{}]*{", text):
        nested = [one.values() if isinstance(one, Mapping) else one for one in given]
        values = [two for one in nested for two in (one if isinstance(one, Iterable) else [one])]
        size += max((abs(one) for one in values if isinstance(one, int)), default=0) * len(text)
    return size
