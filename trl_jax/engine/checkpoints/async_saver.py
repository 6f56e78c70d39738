"""Writes while training goes on: copies of arrays on the host, and a thread with one job at a time."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

logger = logging.getLogger(__name__)


class AsyncSaver:
    """Runs one job at a time in a thread. An error of the job is raised by the next call, in the thread that calls."""

    def __init__(self):
        self._job: Future | None = None

    def begin(self, job: Callable[[], None]) -> None:
        """Start this job as soon as the one before has ended."""
        self.settle()
        pool = ThreadPoolExecutor(1, thread_name_prefix="trl_jax-save")
        self._job = pool.submit(job)
        pool.shutdown(wait=False)  # its thread ends with the job

    def check(self) -> None:
        """Raise the job's error, if it has ended with one."""
        if self._job is not None and self._job.done():
            self.settle()

    def settle(self) -> None:
        """Wait for the job, and raise its error."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Wait for the job at the end of the block. Where the block itself raises, the job's error is only logged."""
        try:
            yield
        except BaseException:
            try:
                self.settle()
            except Exception as error:  # the block's own error is the one to raise
                logger.error("%s", error)
            raise
        self.settle()


def host_copy(tree: Any) -> Any:
    """The arrays of a pytree as NumPy arrays with memory of their own; several are copied at once."""
    leaves, structure = jax.tree.flatten(tree)
    for leaf in leaves:
        leaf.copy_to_host_async()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return jax.tree.unflatten(structure, list(pool.map(_copy, leaves)))


def _copy(leaf: jax.Array) -> np.ndarray:
    """On a CPU, copies through a view that ends here. `np.asarray` would leave its view with the array, and a step
    copies an array that has a view instead of taking its memory."""
    on_cpu = leaf.is_fully_addressable and {device.platform for device in leaf.devices()} == {"cpu"}
    if on_cpu and len(leaf.devices()) == 1 and leaf.dtype.isbuiltin == 1:  # not bfloat16
        return np.from_dlpack(leaf).copy()
    return np.array(leaf)
