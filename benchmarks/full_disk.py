"""Save checkpoints to file systems that are full or read-only: sudo python -m benchmarks.full_disk

Mounts a tmpfs of each size from just enough for one checkpoint to enough for two, so that the second save fails at each
of its writes. The first checkpoint must stay intact, and the second one must be complete or absent.
"""

from __future__ import annotations

import argparse
import errno
import json
import subprocess
import tempfile
from pathlib import Path

from compat_tests.faults.killed_saves import check, save

PAGE = 4096


def mounted(folder: Path, pages: int) -> None:
    how = f"size={pages * PAGE},mode=755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", how, "none", str(folder)], check=True)


def size_of_one(folder: Path) -> int:
    save(folder / "measured", 2)
    return sum(-(-path.stat().st_size // PAGE) for path in (folder / "measured").rglob("*"))


def full(folder: Path, pages: int) -> str:
    """The outcome of the second save: "refused" or "saved"."""
    mounted(folder, pages)
    try:
        save(folder / "run", 2)
        try:
            save(folder / "run", 4)
        except OSError as error:
            assert error.errno == errno.ENOSPC and "earlier ones are untouched" in str(error), error
            assert check(folder / "run", {2}, f"{pages} pages") == 2
            return "refused"
        assert check(folder / "run", {4}, f"{pages} pages") == 4
        return "saved"
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def read_only(folder: Path) -> None:
    mounted(folder, 1000)
    try:
        save(folder / "run", 2)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        try:
            save(folder / "run", 4)
        except OSError as error:
            assert error.errno == errno.EROFS, error
        else:
            raise AssertionError("saved onto a read-only file system")
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        assert check(folder / "run", {2}, "read-only") == 2
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as base:
        pages_of_one = size_of_one(Path(base))
        folder = Path(base, "disk")
        folder.mkdir()
        outcomes = [full(folder, pages) for pages in range(pages_of_one + 4, 2 * pages_of_one + 20)]
        read_only(folder)
    assert outcomes == sorted(outcomes), "a larger disk failed where a smaller one did not"
    print(json.dumps({what: outcomes.count(what) for what in ("refused", "saved")} | {"read-only": "refused"}))


if __name__ == "__main__":
    main()
