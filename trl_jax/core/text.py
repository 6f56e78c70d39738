"""Text for the user: printable values, out-of-memory errors, and output from signal handlers."""

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

# Out-of-memory errors


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn a failed allocation into a MemoryError that names the file or folder being read.

    Python raises MemoryError, mmap OSError, JAX RuntimeError; the safetensors extension panics with an exception that
    does not derive from Exception.
    """
    try:
        yield
    except BaseException as error:
        if not _is_out_of_memory(error):
            raise
        size = f" of {path.stat().st_size:,} bytes" if path.is_file() else ""
        reason = f" ({str(error).splitlines()[0]})" if str(error) else ""
        raise MemoryError(
            f"{path}{size} does not fit into free memory{reason}. Free some memory or use a machine with more."
        ) from (error if isinstance(error, Exception) else None)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, MemoryError) or is_panic(error) and "pointer" in str(error)


def is_panic(error: BaseException) -> bool:
    """Whether a Rust extension panicked. Its exception is not an Exception, and cannot be imported from anywhere."""
    return type(error).__name__ == "PanicException"


# Values from datasets, templates and files, made printable and short for error messages

_MAX_NAME = 120  # characters per name in a list


def printable(text: str) -> str:
    r"""Escape control characters as `\x1b` etc., so that a terminal does not interpret them.

    Lone surrogates, which cannot be printed, and invisible characters are escaped, too. Newlines and tabs stay.
    """
    return "".join(
        char if char in "\n\t" or unicodedata.category(char)[0] != "C" else ascii(char)[1:-1] for char in text
    )


def brief(value: Any, most: int = 80) -> str:
    """The repr of a value in at most `most` characters. Long or deep values are not traversed beyond that."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 2 * most + 10  # reprlib cuts in the middle; we cut the end below
    short.maxlist = short.maxtuple = short.maxdict = short.maxset = 25
    short.maxlevel = 4
    text = printable(short.repr(value))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def listed(names: Collection[str], most: int = 8, separator: str = ", ") -> str:
    """Join the first `most` names, each of bounded length, and say how many more there are."""
    first = [name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 3]}..." for name in list(names)[:most]]
    more = len(names) - len(first)
    return printable(separator.join(first)) + (f"{separator}and {more:,} more" if more > 0 else "")


# Output from signal handlers


def say(text: str) -> None:
    """Write a line to stderr without logging: the interrupted code may hold the log handler's lock."""
    with contextlib.suppress(OSError):  # stderr is closed
        os.write(sys.__stderr__.fileno(), f"trl_jax: {text}\n".encode())
