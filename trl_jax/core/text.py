"""Text for the user: printable values, memory errors, and lines from signal handlers."""

from __future__ import annotations

import contextlib
import errno
import os
import reprlib
import sys
import unicodedata
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

# ----------------------------------------------------------------------------------------------------
# Errors of memory that could not be had, with the file that was read.


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn a failed allocation into a MemoryError that names this file or folder.

    Python raises MemoryError, a mapped file OSError, JAX RuntimeError; safetensors' extension panics, outside of
    Exception.
    """
    try:
        yield
    except BaseException as error:
        if not _is_of_memory(error):
            raise
        size = f" of {path.stat().st_size:,} bytes" if path.is_file() else ""
        said = f" ({str(error).splitlines()[0]})" if str(error) else ""
        raise MemoryError(
            f"{path}{size} does not fit into the memory that is free{said}. Free some, or take a machine with more."
        ) from (error if isinstance(error, Exception) else None)


def _is_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, MemoryError) or is_panic(error) and "pointer" in str(error)


def is_panic(error: BaseException) -> bool:
    """Whether an extension in Rust gave up; its exception is no Exception, and has no module to import it from."""
    return type(error).__name__ == "PanicException"


# ----------------------------------------------------------------------------------------------------
# Text and values of a dataset, a template or a file, as an error may show them: printable, and not too long.


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


# ----------------------------------------------------------------------------------------------------
# A line to the user at a time when logging could block: from within a signal's handler.


def say(text: str) -> None:
    """Write a line to stderr, not through logging: an interrupted handler may have its lock, and never release it."""
    with contextlib.suppress(OSError):  # nobody reads it any more
        os.write(sys.__stderr__.fileno(), f"trl_jax: {text}\n".encode())
