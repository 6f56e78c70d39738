"""Signal handlers of this process that a forked child is not to run.

A reward function may compute in a `multiprocessing.Pool`, whose workers are forked where that is the platform's way.
They would inherit the handlers of a training run, and one that merely remembers the signal would keep
`Process.terminate()`, and a pool that waits for it, from ever ending them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | None
_replaced: dict[tuple[int, Handler], Handler] = {}
_taken_by_libraries: set[int] = set()
_mask = threading.local()  # of the thread that forks


def handle(numbers: Iterable[int], handler: Handler, *, children_too: Iterable[int] = ()) -> dict[int, Handler]:
    """Install `handler` for these signals, in the main thread.

    Args:
        children_too: those of the signals for which a forked child keeps `handler`. For the others it has the handler
            that was there before.

    Returns:
        The handlers that were there before, as `restore` takes them.
    """
    before = {number: signal.signal(number, handler) for number in numbers}
    _replaced.update({(number, handler): there for number, there in before.items() if number not in set(children_too)})
    return before


def restore(before: dict[int, Handler]) -> None:
    """Install the handlers that `handle` replaced."""
    for number, handler in before.items():
        _replaced.pop((number, signal.getsignal(number)), None)
        signal.signal(number, handler)


def default_in_children(number: int) -> None:
    """Give forked children the default handler of a signal that a library handles by itself, unknown to Python."""
    _taken_by_libraries.add(number)


def _block() -> None:
    """Keep signals from the child until it has its own handlers: those of the parent would swallow them."""
    numbers = {number for number, _ in _replaced} | _taken_by_libraries
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _restore_in_child() -> None:
    for number in _taken_by_libraries:
        signal.signal(number, signal.SIG_DFL)
    for number in {number for number, _ in _replaced}:
        handler = current = signal.getsignal(number)
        while (number, handler) in _replaced:
            handler = _replaced[number, handler]
        if handler is not current:
            signal.signal(number, handler)
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_restore_in_child)
