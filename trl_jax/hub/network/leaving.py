"""Signals while the Hub is waited for, outside of train(), which handles them itself."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from trl_jax.core.say import say

_ENDING = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
_ALL = _ENDING | {signal.SIGINT: signal.default_int_handler}


@contextlib.contextmanager
def leaving_told(operations: Callable[[], list[str]], cut_off: Callable[[], None]) -> Iterator[None]:
    """Within the block, a signal that would end the process says which operations that cuts off.

    SIGINT raises KeyboardInterrupt, after `cut_off`: the client's threads would be waited for. The others end the
    process, as without us, with the exit status 128 + n. Handlers of the script, or of a run, stay in place.
    """
    before = _handled(_ALL, operations, cut_off)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def told_from_now_on(operations: Callable[[], list[str]]) -> None:
    """As `leaving_told`, without an end and without SIGINT, which leaves the script's threads alone."""
    _handled(_ENDING, operations, lambda: None)


def _handled(defaults: dict, operations: Callable[[], list[str]], cut_off: Callable[[], None]) -> dict:
    """Handle signals that have these handlers, and return what was replaced; nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}

    def leave(number: int, frame: FrameType | None) -> None:
        for operation in operations():
            say(f"{signal.Signals(number).name}: leaving while {operation}. That is cut off.")
        if number == signal.SIGINT:
            cut_off()
            raise KeyboardInterrupt
        os._exit(128 + number)

    taken = [number for number, default in defaults.items() if signal.getsignal(number) == default]
    return {number: signal.signal(number, leave) for number in taken}
