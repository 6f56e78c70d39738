"""Text of a dataset, a template or a file, as an error may show it."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    r"""The text with control characters written as `\x1b` and the like: a terminal would obey them.

    So are lone surrogates, which cannot be printed, and invisible characters; line ends and tabs stay.
    """
    return "".join(
        char if char in "\n\t" or unicodedata.category(char)[0] != "C" else ascii(char)[1:-1] for char in text
    )
