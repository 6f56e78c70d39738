"""Text and values of a dataset, a template or a file, as an error may show them: printable, and not too long."""

from __future__ import annotations

import reprlib
import unicodedata
from collections.abc import Collection
from typing import Any

_LONGEST = 120  # characters of a name in a list


def printable(text: str) -> str:
    r"""The text with control characters written as `\x1b` and the like: a terminal would obey them.

    So are lone surrogates, which cannot be printed, and invisible characters; line ends and tabs stay.
    """
    return "".join(
        char if char in "\n\t" or unicodedata.category(char)[0] != "C" else ascii(char)[1:-1] for char in text
    )


def brief(value: Any, most: int = 80) -> str:
    """The repr of a value in at most that many characters. Of long or deep values the rest is not even looked at."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 2 * most + 10  # cut below, at the end and not in the middle
    short.maxlist = short.maxtuple = short.maxdict = short.maxset = 25
    short.maxlevel = 4
    text = printable(short.repr(value))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def listed(names: Collection[str], most: int = 8, separator: str = ", ") -> str:
    """The first of some names, each of bounded length, and how many more there are."""
    first = [name if len(name) <= _LONGEST else f"{name[: _LONGEST - 3]}..." for name in list(names)[:most]]
    more = len(names) - len(first)
    return printable(separator.join(first)) + (f"{separator}and {more:,} more" if more > 0 else "")
