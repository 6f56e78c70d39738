"""Files of the Hub's cache, compared with the sha256 that the Hub gave for them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path

import huggingface_hub

_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_digest(file: Path, model: str) -> None:
    """Compare a file of the cache with its digest, once for as long as it stays as it is.

    The cache calls a large file's content by the sha256 that the Hub gives for it, and links to that. Other files, and
    a cache without links, are not compared.

    Raises:
        ValueError: it is another file; it is gone from the cache, so the next one to ask fetches it again.
    """
    wanted = Path(os.readlink(file)).name if file.is_symlink() else ""
    if _SHA256.fullmatch(wanted) is None or not file.is_file():
        return
    content = file.resolve()
    stat = content.stat()
    state = f"{wanted} {stat.st_size} {stat.st_mtime_ns}"
    mark = _mark(content)
    if mark is not None and mark.is_file() and mark.read_text(encoding="utf-8") == state:
        return
    with content.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != wanted:
        for part in (file, file.parent / os.readlink(file), content):
            part.unlink(missing_ok=True)
        raise ValueError(
            f"model={model!r}: {file.name} came damaged. Its sha256 is {found}, that on the Hub is {wanted}. It was "
            f"removed from the cache ({file}): start again, which fetches it anew. If that does not help, something "
            "between here and the Hub (a proxy, a mirror, the disk) changes files."
        )
    if mark is not None:
        with contextlib.suppress(OSError):  # nowhere to note it: it is compared again
            mark.write_text(state, encoding="utf-8")


def _mark(content: Path) -> Path | None:
    """The file that notes what was compared; None where none can be written."""
    try:
        folder = huggingface_hub.cached_assets_path("trl_jax", "digests", "compared")
    except OSError:
        return None
    return Path(folder) / hashlib.sha256(str(content).encode()).hexdigest()[:32]
