"""A folder into which nobody else can put files: for what this process would run."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from pathlib import Path

_WHY = "and this process would run what they put there. Take a folder that is yours alone, as `chmod 700` makes it."


def own_folder(path: str | Path) -> Path:
    """The folder behind all links, made with mode 0700 where it is not there, and so are the folders above it.

    Root is trusted: it can do anything anyway. Above the folder others may write where the sticky bit keeps them from
    renaming what is not theirs, as in /tmp.

    Raises:
        PermissionError: another user can put files there, or has done so.
        OSError: it cannot be made.
    """
    folder = Path(os.path.realpath(path))
    for part in reversed([folder, *folder.parents]):  # from the top: below a safe one nothing is swapped meanwhile
        if not part.exists():
            part.mkdir(mode=0o700, exist_ok=True)
        _check(part, part.lstat(), inside=part == folder)
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # another run of the same user's may tidy up
            _check_owner(Path(entry.path), entry.stat(follow_symlinks=False))
    return folder


def _check(folder: Path, status: os.stat_result, inside: bool) -> None:
    """`inside`: files are put into this very folder, so no sticky bit helps."""
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is no folder.")
    _check_owner(folder, status)
    others = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid))
    if others and (inside or not status.st_mode & stat.S_ISVTX):
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(f"{folder} has mode {mode:04o}, so others can write to it, {_WHY}")


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to user {status.st_uid} and not to {os.geteuid()}, {_WHY}")


def _is_own_group(group: int) -> bool:
    """Whether this user is alone in it, as many systems give each user a group of the same name."""
    try:
        user, entry = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == user and set(entry.gr_mem) <= {user}
