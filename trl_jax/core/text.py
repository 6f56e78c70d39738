"""Text for the user: tracebacks, out-of-memory errors, printable values, and output from signal handlers."""

from __future__ import annotations

import contextlib
import errno
import functools
import opcode
import os
import reprlib
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

# Tracebacks

FRAMES_HIDDEN = "The frames inside trl_jax are hidden. TRL_JAX_TRACEBACK=1 in the environment shows them."
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_RAISE = opcode.opmap["RAISE_VARARGS"]
_LIBRARIES = sys.stdlib_module_names | set(
    "datasets flax huggingface_hub jax jaxlib jinja2 numpy optax pyarrow safetensors tokenizers transformers".split()
)


def api_boundary(function: Callable) -> Callable:
    """Decorate a function that users call: if the user caused an error, it is raised without our frames."""

    @functools.wraps(function)
    def boundary(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    return boundary


def hide_frames(error: Exception) -> None:
    """Remove frames of trl_jax and of the libraries it calls from the traceback of an error that the user caused.

    Frames of the user's own functions, such as a reward function, are kept with everything they call. A note says how
    to show the hidden frames. An error that looks like a bug in trl_jax keeps all frames, e.g. one raised inside
    trl_jax by anything other than a `raise` statement. Call this in an `except` clause, before a bare `raise`.
    """
    if os.environ.get("TRL_JAX_TRACEBACK") == "1" or not _caused_by_user(error):
        return
    for chained in _error_chain(error):
        chained.__traceback__ = _user_frames(chained.__traceback__)
    if FRAMES_HIDDEN not in vars(error).get("__notes__", ()):
        error.add_note(FRAMES_HIDDEN)


def without_launcher(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame of the user's script on; None if the script never started."""
    while traceback is not None and _owner(traceback) != "user":
        traceback = traceback.tb_next
    return traceback


def _caused_by_user(error: BaseException) -> bool:
    if FRAMES_HIDDEN in vars(error).get("__notes__", ()):
        return True
    frames = list(_walk(error.__traceback__))
    last, callers = frames[-1], [owner for frame in frames if (owner := _owner(frame)) != "library"]
    if _owner(last) == "ours":
        raised = last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE
        return raised and not isinstance(error, AssertionError)
    return callers[-1] == "user" or isinstance(error, OSError | ValueError | ImportError)


def _user_frames(traceback: TracebackType | None) -> TracebackType | None:
    frames, inside = [], True
    for frame in _walk(traceback):
        owner = _owner(frame)
        inside = owner == "ours" or (inside and owner == "library")
        frames += [] if inside else [frame]
    result = None
    for frame in reversed(frames):
        result = TracebackType(result, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return result


def _owner(traceback: TracebackType) -> str:
    """Whose code a frame runs: "ours", "library" (the standard library or one that we call) or "user"."""
    code, module = traceback.tb_frame.f_code, str(traceback.tb_frame.f_globals.get("__name__"))
    top = module.partition(".")[0]
    if top == "trl_jax" or code.co_filename.startswith(_PACKAGE):
        return "ours"
    generated = code.co_filename == "<string>" and code.co_name == "__init__"  # of a dataclass
    return "library" if top in _LIBRARIES or generated else "user"


def _walk(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _error_chain(error: BaseException) -> list[BaseException]:
    """The error, its causes, and the errors during whose handling they were raised."""
    errors, pending = [], [error]
    while pending:
        current = pending.pop()
        if current is not None and current not in errors:
            errors.append(current)
            pending += [current.__cause__, current.__context__]
    return errors


# Out-of-memory errors


@contextlib.contextmanager
def out_of_memory_names(path: Path) -> Iterator[None]:
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
    """Whether a Rust extension panicked. Its exception is not an Exception, and cannot be imported."""
    return type(error).__name__ == "PanicException"


# Values from datasets, templates and files, made printable and short for error messages

_MAX_NAME = 120  # characters per name in a list


def printable(text: str) -> str:
    r"""Escape control characters as `\x1b` etc., so that a terminal does not interpret them.

    Lone surrogates, which cannot be printed, and invisible characters are escaped, too. Newlines and tabs are kept.
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
    """Join the first `most` names, each of bounded length, and append how many more there are."""
    first = [name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 3]}..." for name in list(names)[:most]]
    more = len(names) - len(first)
    return printable(separator.join(first)) + (f"{separator}and {more:,} more" if more > 0 else "")


# Output from signal handlers


def say(text: str) -> None:
    """Write a line to stderr without logging: the interrupted code may hold the log handler's lock."""
    with contextlib.suppress(OSError):  # stderr is closed
        os.write(sys.__stderr__.fileno(), f"trl_jax: {text}\n".encode())
