"""SIGTERM and SIGINT: the first one lets the step finish, a second one ends the process at once."""

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
    """`received` is the first signal that came, None before."""

    def __init__(self):
        self.received: signal.Signals | None = None

    @contextlib.contextmanager
    def heeded(self, promise: str) -> Iterator[None]:
        """Within it signals come here; afterwards they do again what they did. `promise` says what one will lead to.

        Only a main thread may do this: elsewhere signals keep doing what they did. With several processes they come to
        JAX (`agree`).
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
        """Of several processes, all stop after the same step: JAX sees SIGTERM to one, and tells the others."""
        if several() and multihost_utils.reached_preemption_sync_point(step):
            self.received = signal.SIGTERM

    def leave(self) -> None:
        """Raises SystemExit with the code that shells expect of a process ended by this signal: 143 or 130."""
        _say(f"{self.received.name}: leaving.")
        raise SystemExit(128 + self.received)


def _say(text: str) -> None:
    # Not through logging: a handler that was interrupted while it held its lock would never give it back.
    os.write(sys.__stderr__.fileno(), f"trl_jax: {text}\n".encode())
