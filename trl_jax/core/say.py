"""A line to the user at a time when logging could block: from within a signal's handler."""

from __future__ import annotations

import contextlib
import os
import sys


def say(text: str) -> None:
    """Write a line to stderr, not through logging: an interrupted handler may have its lock, and never release it."""
    with contextlib.suppress(OSError):  # nobody reads it any more
        os.write(sys.__stderr__.fileno(), f"trl_jax: {text}\n".encode())
