"""Writing beside the training: a copy of the arrays that no step touches, and one job at a time in a thread."""

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
    """At most one job under way. What it raises comes out of the next call, in the thread that asks."""

    def __init__(self):
        self._job: Future | None = None

    def begin(self, job: Callable[[], None]) -> None:
        """Returns once the job before has ended and this one is under way."""
        self.settle()
        pool = ThreadPoolExecutor(1, thread_name_prefix="trl_jax-save")
        self._job = pool.submit(job)
        pool.shutdown(wait=False)  # its thread ends with the job

    def check(self) -> None:
        """Raises what the job raised, if it has ended."""
        if self._job is not None and self._job.done():
            self.settle()

    def settle(self) -> None:
        """Waits for the job, and raises what it raised."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """No job outlives the block. Where the block itself raises, a job's error is only logged."""
        try:
            yield
        except BaseException:
            try:
                self.settle()
            except Exception as error:
                logger.error("%s", error)
            raise
        self.settle()


def copied(tree: Any) -> Any:
    """The arrays of a pytree as NumPy's own, whatever becomes of JAX's; several are copied at once."""
    leaves, structure = jax.tree.flatten(tree)
    for leaf in leaves:
        leaf.copy_to_host_async()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return jax.tree.unflatten(structure, list(pool.map(_copy, leaves)))


def _copy(leaf: jax.Array) -> np.ndarray:
    """On a CPU by way of a view that ends here: the one that `np.asarray` gives stays with the array, and a step that
    is given an array with a view copies it instead of taking its memory."""
    on_cpu = leaf.is_fully_addressable and {device.platform for device in leaf.devices()} == {"cpu"}
    if on_cpu and len(leaf.devices()) == 1 and leaf.dtype.isbuiltin == 1:  # not bfloat16
        return np.from_dlpack(leaf).copy()
    return np.array(leaf)
