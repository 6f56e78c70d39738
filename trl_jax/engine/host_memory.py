"""How much memory the host has, and could still give; a container's limit is its host's."""

from __future__ import annotations

import os
from pathlib import Path

GROUP = Path("/sys/fs/cgroup")  # the control group of this process, version 2, as a container sees it


def whole() -> int:
    """Bytes in all; 0 where nobody knows."""
    try:
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # Windows has no sysconf, and not every one has these names
        return 0
    limit = _limit()
    return installed if limit is None else min(installed, limit)


def spare() -> int | None:
    """Bytes that could still be had, by Linux's count; None elsewhere."""
    known = Path("/proc/meminfo")
    if not known.exists():
        return None
    lines = dict(line.split(":", 1) for line in known.read_text().splitlines())
    available, limit = 1024 * int(lines["MemAvailable"].split()[0]), _limit()
    return available if limit is None else min(available, limit - int((GROUP / "memory.current").read_text()))


def _limit() -> int | None:
    told = GROUP / "memory.max"
    text = told.read_text().strip() if told.exists() else "max"
    return None if text == "max" else int(text)
