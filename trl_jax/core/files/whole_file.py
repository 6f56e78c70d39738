"""Files that are there as a whole or not at all: written beside their place and renamed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what then takes the place of `path`. Where the block raises, what was there stays. A link of
    either name is replaced, not followed."""
    beside = path.with_name(f"{path.name}.part")
    beside.unlink(missing_ok=True)
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file of text, in UTF-8."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")
