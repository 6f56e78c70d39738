"""Reads how much memory the host has and how much is available; a container's limit counts as its host's."""

from __future__ import annotations

import os
from pathlib import Path

GROUP = Path("/sys/fs/cgroup")  # the control group of this process, version 2, as a container sees it


def total() -> int:
    """Bytes of memory; 0 where the system does not say."""
    try:
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # Windows has no sysconf, and not every one has these names
        return 0
    limit = _limit()
    return installed if limit is None else min(installed, limit)


def available() -> int | None:
    """Bytes that could still be allocated, by Linux's count; None elsewhere."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free, limit = 1024 * int(lines["MemAvailable"].split()[0]), _limit()
    return free if limit is None else min(free, limit - int((GROUP / "memory.current").read_text()))


def _limit() -> int | None:
    path = GROUP / "memory.max"
    text = path.read_text().strip() if path.exists() else "max"
    return None if text == "max" else int(text)
