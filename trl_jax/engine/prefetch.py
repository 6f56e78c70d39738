"""The next batch is made and placed while the device is at this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any

_AHEAD = 2  # batches that wait


@dataclass
class Prefetched:
    """`batches` made by a thread of its own, in order; what goes wrong there is raised where the batch is asked for.

    place: what the thread does to a batch once it is made; None does nothing.
    """

    batches: Any
    place: Callable[[Any], Any] | None = None

    def set_epoch(self, epoch: int, skip: int = 0, skipped_digest: int | None = None) -> None:
        self.batches.set_epoch(epoch, skip, skipped_digest)

    def __iter__(self) -> Iterator[Any]:
        queue, stop = Queue(_AHEAD), Event()
        thread = Thread(target=self._make, args=(queue, stop), name="trl_jax-batches", daemon=True)
        thread.start()
        try:
            while True:
                batch, error, over = queue.get()
                if error is not None:
                    raise error
                if over:
                    return
                yield batch
        finally:
            _end(thread, queue, stop)

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
    """Wait until the thread has gone: what it reads may be read again by the next."""
    stop.set()
    while thread.is_alive():
        try:
            queue.get(timeout=0.02)
        except Empty:
            continue
    thread.join()
