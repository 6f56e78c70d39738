"""Errors of memory that could not be had, with the file that was read."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path


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
