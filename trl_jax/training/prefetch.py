"""Makes and places the next batch while the device computes this one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any

_AHEAD = 2  # batches that wait
_POLL, _LONGEST_WAIT = 0.5, 5.0  # seconds: between calls of `waiting`, and for the thread to end


@dataclass
class Prefetched:
    """Iterates over `batches` in a thread, in order. The thread's errors are raised where the batch is asked for.

    Attributes:
        place: applied to each batch in the thread; None leaves batches as they are.
        waiting: called every half second while no batch comes, as when streamed rows stall; its errors end the wait.
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
                return queue.get(timeout=_POLL)
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


@dataclass
class AsNeeded:
    """Iterates over `batches` as they are asked for, in no thread: each is made with the newest parameters.

    place: applied to each batch; None leaves batches as they are.
    """

    batches: Any
    place: Callable[[Any], Any] | None = None

    def set_epoch(self, epoch: int, skip: int = 0, skipped_digest: int | None = None) -> None:
        self.batches.set_epoch(epoch, skip, skipped_digest)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield batch if self.place is None else self.place(batch)


def _end(thread: Thread, queue: Queue, stop: Event) -> None:
    """Wait for the thread to end, as the next thread may read the same rows. A thread whose rows have stalled is left
    alone and ends with its next batch."""
    stop.set()
    until = time.monotonic() + _LONGEST_WAIT
    while thread.is_alive() and time.monotonic() < until:
        with contextlib.suppress(Empty):
            queue.get(timeout=0.02)
