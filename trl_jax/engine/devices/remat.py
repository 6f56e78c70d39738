"""Chooses how much the backward pass keeps of the forward pass: as much as fits, for the rest is computed twice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from trl_jax.engine.devices import host_memory
from trl_jax.engine.devices.processes import several

logger = logging.getLogger(__name__)

_SHARE = 0.95  # of an accelerator's memory; the rest is for gaps between arrays


class RematFallback:
    """Compiles the first of a step's versions that fits.

    A version that did not fit is not tried again for a batch, the third argument, that is no smaller.

    Args:
        steps: jitted versions of the step with the same values; each takes less memory and more time than the one
            before it.
        room: bytes that a device has for a program and its arguments; 0 where that is unknown, and then the last
            version is taken.
    """

    def __init__(self, steps: Sequence[Callable], room: int):
        self._steps, self._room = steps, room
        self._refused: list[tuple[Callable, list[int]]] = []

    def __call__(self, *arguments: Any) -> Any:
        """The program for these arguments, arrays or their shapes."""
        sizes = [leaf.size for leaf in jax.tree.leaves(arguments[2])]
        for step in self._steps[:-1] if self._room else ():
            if self._is_refused(step, sizes):
                continue
            program, needed = _compiled(step, *arguments)
            if program is not None and needed <= self._room:
                return program
            self._refused.append((step, sizes))
            logger.info(
                "gradient_checkpointing: whole layers are computed twice; to keep their matrix products would take "
                "%s of the %.2f GB there are.",
                "more" if needed is None else f"{needed / 1e9:.2f}",
                self._room / 1e9,
            )
        return self._steps[-1].lower(*arguments).compile()

    def _is_refused(self, step: Callable, sizes: list[int]) -> bool:
        return any(
            one is step and all(least <= size for least, size in zip(smaller, sizes, strict=True))
            for one, smaller in self._refused
        )


def _compiled(step: Callable, *arguments: Any) -> tuple[Any, int | None]:
    """The program and the bytes that it takes with its arguments; (None, None) where the compiler ran out of memory."""
    try:
        program = step.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, None
    sizes = program.memory_analysis()
    outside = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return program, outside + sizes.temp_size_in_bytes


def room_of(device: jax.Device) -> int:
    """Bytes of a device that a step may take. They never change, so that runs can be repeated to the bit.

    On a CPU that is half of the host's memory, divided by its devices: data, evaluation and copies that are being saved
    need some, too. Processes that differ take the least. 0 where the system does not say how much memory it has.
    """
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        room = int(_SHARE * stats["bytes_limit"])
    else:
        room = host_memory.total() // (2 * jax.local_device_count())
    return int(multihost_utils.process_allgather(np.asarray(room, np.float64)).min()) if several() else room
