"""Several processes of one run: who writes, and waiting for each other by name."""

from __future__ import annotations

import jax
from jax.experimental import multihost_utils


def several() -> bool:
    """Whether the run has more processes than this one."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this process writes files and talks to the Hub."""
    return not several() or jax.process_index() == 0


def barrier(name: str) -> None:
    """Wait until every process is at the barrier of this name."""
    if several():
        multihost_utils.sync_global_devices(name)
