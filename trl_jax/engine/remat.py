"""What the backward pass keeps of the forward one: the most that fits, for what is not kept is computed twice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from trl_jax.engine import host_memory
from trl_jax.engine.processes import several

logger = logging.getLogger(__name__)

_SHARE = 0.95  # of an accelerator's memory; what lies in it is never without gaps


class RematFallback:
    """Compiles the first of a step's versions that fits.

    `steps` are jitted and give the same values; each is smaller and slower than the one before it. `room` is what a
    device has for a program and all that the program is given, in bytes; 0 where nobody knows, and then it is the
    smallest. A version that did not fit is not tried again for a batch, the third argument, that is no smaller.
    """

    def __init__(self, steps: Sequence[Callable], room: int):
        self._steps, self._room = steps, room
        self._refused: list[tuple[Callable, list[int]]] = []

    def __call__(self, *given: Any) -> Any:
        """The program for what it is given, arrays or their shapes."""
        sizes = [leaf.size for leaf in jax.tree.leaves(given[2])]
        for step in self._steps[:-1] if self._room else ():
            if self._is_refused(step, sizes):
                continue
            program, needed = _compiled(step, *given)
            if program is not None and needed <= self._room:
                return program
            self._refused.append((step, sizes))
            logger.info(
                "gradient_checkpointing: whole layers are computed twice; to keep their matrix products would take "
                "%s of the %.2f GB there are.",
                "more" if needed is None else f"{needed / 1e9:.2f}",
                self._room / 1e9,
            )
        return self._steps[-1].lower(*given).compile()

    def _is_refused(self, step: Callable, sizes: list[int]) -> bool:
        return any(
            one is step and all(least <= size for least, size in zip(smaller, sizes, strict=True))
            for one, smaller in self._refused
        )


def _compiled(step: Callable, *given: Any) -> tuple[Any, int | None]:
    """The program, and the bytes it takes with all that it is given; None and what is known where there is no room."""
    try:
        program = step.lower(*given).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, None
    told = program.memory_analysis()
    outside = told.argument_size_in_bytes + told.output_size_in_bytes - told.alias_size_in_bytes
    return program, outside + told.temp_size_in_bytes


def room_of(device: jax.Device) -> int:
    """Bytes of a device that a step may take: the same whenever it is asked, so that runs can be repeated to the bit.

    Of a host that is half of its memory, divided by its devices: data, evaluation and copies that are being saved want
    some, too. Processes that differ take the least. 0 where the system does not say what it has.
    """
    told = device.memory_stats() or {}
    if "bytes_limit" in told:
        room = int(_SHARE * told["bytes_limit"])
    else:
        room = host_memory.whole() // (2 * jax.local_device_count())
    return int(multihost_utils.process_allgather(np.asarray(room, np.float64)).min()) if several() else room
