"""Says what of a run's folder is read, pushed and removed: plain files and folders, never what a link leads to."""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)


def entries(folder: Path) -> Iterator[Path]:
    """The plain files and folders in `folder`, by name. Links, pipes, sockets and devices are told of once each."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:  # removed meanwhile
            continue
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            yield path
        else:
            _tell(path.absolute(), "a link" if stat.S_ISLNK(mode) else "neither a file nor a folder")


def is_folder(path: Path) -> bool:
    """Whether there is a folder of this name, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def is_file(path: Path) -> bool:
    """Whether there is a file of this name, not a link to one."""
    return path.is_file() and not path.is_symlink()


@cache
def _tell(path: Path, kind: str) -> None:
    logger.warning("%s is %s: it is left alone, and neither read, pushed nor removed.", path, kind)
