"""The next batch is made and placed while the device is at this one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any

_AHEAD = 2  # batches that wait
_A_WHILE, _AT_MOST = 0.5, 5.0  # seconds: between looks at what else there is to do, and for rows that do not come


@dataclass
class Prefetched:
    """`batches` made by a thread of its own, in order; what goes wrong there is raised where the batch is asked for.

    place: what the thread does to a batch once it is made; None does nothing.
    waiting: called now and then while no batch comes: a stream may stall, and what it raises ends the wait.
    """

    batches: Any
    place: Callable[[Any], Any] | None = None
    waiting: Callable[[], None] | None = None

    def set_epoch(self, epoch: int, skip: int = 0, skipped_digest: int | None = None) -> None:
        self.batches.set_epoch(epoch, skip, skipped_digest)

    def __iter__(self) -> Iterator[Any]:
        queue, stop = Queue(_AHEAD), Event()
        thread = Thread(target=self._make, args=(queue, stop), name="trl_jax-batches", daemon=True)
        thread.start()
        try:
            while True:
                batch, error, over = self._next(queue)
                if error is not None:
                    raise error
                if over:
                    return
                yield batch
        finally:
            _end(thread, queue, stop)

    def _next(self, queue: Queue) -> tuple[Any, BaseException | None, bool]:
        while True:
            try:
                return queue.get(timeout=_A_WHILE)
            except Empty:
                if self.waiting is not None:
                    self.waiting()

    def _make(self, queue: Queue, stop: Event) -> None:
        try:
            for batch in self.batches:
                queue.put((batch if self.place is None else self.place(batch), None, False))
                if stop.is_set():
                    return
            queue.put((None, None, True))
        except BaseException as error:
            queue.put((None, error, False))


def _end(thread: Thread, queue: Queue, stop: Event) -> None:
    """Wait until the thread has gone: what it reads may be read again by the next. One that reads a stream which has
    stalled is left behind, and ends with its next batch."""
    stop.set()
    until = time.monotonic() + _AT_MOST
    while thread.is_alive() and time.monotonic() < until:
        with contextlib.suppress(Empty):
            queue.get(timeout=0.02)
