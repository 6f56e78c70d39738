"""Lets one run at a time write an output_dir."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from trl_jax.engine.checkpoints.plain_files import is_file

LOCK = ".trl_jax.lock"


class RunLock:
    """The lock of an output_dir, held by this run until `release`, or until the process ends, however that is.

    Raises:
        RuntimeError: another run has locked it; the text says which.
    """

    def __init__(self, output_dir: str):
        self._path = Path(output_dir) / LOCK
        self._handle = self._taken()

    def renew(self) -> None:
        """Lock the folder that has the name now, where the one that was locked has been removed or renamed.

        Raises:
            RuntimeError: another run has it.
        """
        if not _is_at(self._path, self._handle):
            handle = self._taken()
            os.close(self._handle)
            self._handle = handle

    def release(self) -> None:
        """Unlock it, and remove the file."""
        if _is_at(self._path, self._handle):  # else the folder was made anew, and the file may be another run's
            self._path.unlink()  # still locked: whoever waits for the file notices, and makes a new one
        os.close(self._handle)

    def _taken(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = locked(self._path)
        except BlockingIOError as error:
            raise RuntimeError(
                f"output_dir={str(self._path.parent)!r} is being written by another run ({error.strerror}). Wait for "
                "it to end, or choose another output_dir."
            ) from error
        os.truncate(handle, 0)
        os.write(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        return handle


@contextlib.contextmanager
def only_run(output_dir: str) -> Iterator[RunLock]:
    """Lock `output_dir` for this run; RuntimeError where another has locked it."""
    lock = RunLock(output_dir)
    try:
        yield lock
    finally:
        lock.release()


def locked(path: Path) -> int:
    """A descriptor of the file, made if need be, that no other process gets until this one is closed.

    Raises:
        BlockingIOError: another has it; `strerror` is the first kilobyte of the file.
        FileExistsError: there is a link of this name, a folder or a device; nothing is done to it.
    """
    while True:
        handle = _opened(path)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(handle, 1000).decode(errors="replace")
            os.close(handle)
            raise BlockingIOError(error.errno, holder, str(path)) from error
        if _is_at(path, handle):
            return handle
        os.close(handle)  # its holder left between the two calls


def _opened(path: Path) -> int:
    if os.path.lexists(path) and not is_file(path):
        raise FileExistsError(errno.EEXIST, "is no plain file, so it cannot be the lock of a run. Remove it", str(path))
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)


def _is_at(path: Path, handle: int) -> bool:
    """Whether the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False
