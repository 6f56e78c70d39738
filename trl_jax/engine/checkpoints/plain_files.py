"""Says what of a run's folder is read, pushed and removed: plain files and folders, never what a link leads to."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)


def entries(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[Path]:
    """The plain files and folders in `folder` of `wanted` names. Of a link, pipe, socket or device a warning tells."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not wanted(path.name) or not os.path.lexists(path):  # removed meanwhile
            continue
        if is_folder(path) or is_file(path):
            yield path
        else:
            _tell(path.absolute(), "a link" if path.is_symlink() else "neither a file nor a folder")


def files_below(folder: Path, wanted: Callable[[str], bool] = lambda name: True, above: str = "") -> Iterator[str]:
    """The plain files at any depth of `folder`, as `above` with their path in it; not below an unwanted folder.

    `wanted` is asked of each such path.
    """
    for path in entries(folder, lambda name: wanted(above + name)):
        if is_folder(path):
            yield from files_below(path, wanted, f"{above}{path.name}/")
        else:
            yield above + path.name


def is_folder(path: Path) -> bool:
    """Whether there is a folder of this name, not a link to one."""
    return stat.S_ISDIR(_mode(path))


def is_file(path: Path) -> bool:
    """Whether there is a file of this name, not a link to one."""
    return stat.S_ISREG(_mode(path))


def discard(path: Path) -> None:
    """Remove a folder with everything in it, or whatever else has the name: of a link the link."""
    if is_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _mode(path: Path) -> int:
    """0 where there is nothing."""
    try:
        return path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


@cache
def _tell(path: Path, kind: str) -> None:
    logger.warning("%s is %s: it is left alone, and neither read, pushed nor removed.", path, kind)
