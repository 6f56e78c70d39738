"""Handles SIGTERM and SIGINT: the first one lets the step finish, a second one ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from jax.experimental import multihost_utils

from trl_jax.engine.processes import several

_HEEDED = (signal.SIGTERM, signal.SIGINT)


class Interrupts:
    """The signals of a run; `received` is the first one, None before."""

    def __init__(self):
        self.received: signal.Signals | None = None

    @contextlib.contextmanager
    def heeded(self, promise: str) -> Iterator[None]:
        """Handle signals within the block. `promise` tells the user what the first one will lead to.

        Outside of the main thread signals are left as they were, which Python requires; with several processes JAX
        handles them (see `agree`).
        """
        if several() or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._promise = promise
        before = {number: signal.signal(number, self._take) for number in _HEEDED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is not None:
            _say(f"{name} again: leaving at once, without saving.")
            os._exit(128 + number)
        self.received = signal.Signals(number)
        _say(f"{name}: finishing this step, then {self._promise}. Send it again to leave at once.")

    def agree(self, step: int) -> None:
        """Let several processes stop after the same step: JAX passes a SIGTERM of one on to the others."""
        if several() and multihost_utils.reached_preemption_sync_point(step):
            self.received = signal.SIGTERM

    def leave(self) -> None:
        """Raise SystemExit with the code that shells expect of a process ended by this signal: 143 or 130."""
        _say(f"{self.received.name}: leaving.")
        raise SystemExit(128 + self.received)


def _say(text: str) -> None:
    # Not through logging: an interrupted handler may have its lock, and would never release it.
    os.write(sys.__stderr__.fileno(), f"trl_jax: {text}\n".encode())
