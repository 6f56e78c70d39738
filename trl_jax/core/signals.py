"""Signal handlers that forked children do not inherit.

A training run's handler only records SIGTERM, so that the step can finish. A worker of a `multiprocessing.Pool` in a
reward function would inherit it and survive `terminate()`, and the pool would wait for that worker forever.
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
_library_signals: set[int] = set()
_mask = threading.local()  # of the thread that forks


def handle(numbers: Iterable[int], handler: Handler, *, children_too: Iterable[int] = ()) -> dict[int, Handler]:
    """Install `handler` for these signals, in the main thread.

    Args:
        children_too: signals for which forked children inherit `handler`. For the other signals, children get the
            previous handler.

    Returns:
        The previous handlers, to pass to `restore`.
    """
    previous = {number: signal.signal(number, handler) for number in numbers}
    reset = previous.keys() - set(children_too)
    _replaced.update({(number, handler): previous[number] for number in reset})
    return previous


def restore(previous: dict[int, Handler]) -> None:
    """Install the handlers that `handle` replaced."""
    for number, handler in previous.items():
        _replaced.pop((number, signal.getsignal(number)), None)
        signal.signal(number, handler)


def default_in_children(number: int) -> None:
    """Reset a signal to its default in forked children. For signals that a library handles in C, whose handler Python
    cannot see."""
    _library_signals.add(number)


def _block() -> None:
    """Block signals during the fork: until the child's handlers are reset, the parent's would consume them."""
    numbers = {number for number, _ in _replaced} | _library_signals
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _restore_in_child() -> None:
    for number in _library_signals:
        signal.signal(number, signal.SIG_DFL)
    for number in {number for number, _ in _replaced}:
        handler = current = signal.getsignal(number)
        while (number, handler) in _replaced:
            handler = _replaced[number, handler]
        if handler is not current:
            signal.signal(number, handler)
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_restore_in_child)
