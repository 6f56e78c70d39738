"""Accelerators that `trl-jax plan` knows, with their published figures."""

from __future__ import annotations

import math
import re
from typing import NamedTuple


class Chip(NamedTuple):
    """Published figures of a chip.

    flops: dense bfloat16 operations per second.
    memory: bytes.
    bandwidth: bytes per second between the chip and its memory.
    links: bytes per second to other chips, both directions together.
    axes: dimensions of a topology, such as 2 for "4x4".
    source: URL of the figures.
    """

    flops: float
    memory: float
    bandwidth: float
    links: float
    axes: int
    source: str


_MIB, _GIB = 2**20, 2**30
_CLOUD, _NVIDIA = "https://cloud.google.com/tpu/docs/", "https://www.nvidia.com/en-us/data-center/"
CHIPS = {
    "v5e": Chip(197e12, 16 * _GIB, 819e9, 400e9, 2, _CLOUD + "v5e"),
    "v6e": Chip(918e12, 32 * _GIB, 1638e9, 800e9, 2, _CLOUD + "v6e"),
    "v5p": Chip(459e12, 95 * _GIB, 2765e9, 1200e9, 3, _CLOUD + "v5p"),
    # SXM modules. NVIDIA's datasheets give FLOPs with sparsity, twice these (for the A100, both), and memory in round
    # GB. The driver reports the MiB given here (thundergolfer.com/blog/nvidia-gpu-memory-capacity).
    "a100": Chip(312e12, 81_920 * _MIB, 2039e9, 600e9, 1, _NVIDIA + "a100"),
    "h100": Chip(989.4e12, 81_559 * _MIB, 3350e9, 900e9, 1, _NVIDIA + "h100"),
    "h200": Chip(989.4e12, 143_771 * _MIB, 4800e9, 900e9, 1, _NVIDIA + "h200"),
}
SIMULATED = "cpu"  # simulated devices on this machine's CPU, to see how arrays are sharded


class Topology(NamedTuple):
    """`chip` is None for simulated devices; `shape` is then their number."""

    name: str
    kind: str
    shape: tuple[int, ...]
    chip: Chip | None

    @property
    def devices(self) -> int:
        return math.prod(self.shape)

    @property
    def platform(self) -> str:
        """JAX's name of the platform."""
        if self.kind == SIMULATED:
            return "cpu"
        return "gpu" if self.chip.axes == 1 else "tpu"


def topology(name: str) -> Topology:
    """Parse a name such as "v5e:4x4", "h100:8" or "cpu:8".

    Raises:
        ValueError: the name is unknown.
    """
    match = re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+)*)", name)
    kind, sizes = match.groups() if match else (None, "")
    shape = tuple(map(int, sizes.split("x"))) if sizes else ()
    if kind not in (*CHIPS, SIMULATED) or 0 in shape:
        raise ValueError(f"--topology {name} is unknown. {known_chips()}")
    chip = CHIPS.get(kind)
    dimensions = chip.axes if chip else 1
    if len(shape) != dimensions:
        example = f"{kind}:{'x'.join('2' * dimensions)}"
        raise ValueError(f"--topology {name}: expected a shape such as {example}. {known_chips()}")
    return Topology(name, kind, shape, chip)


def known_chips() -> str:
    """A sentence listing the known chips with their memory and FLOPs."""
    kinds = [
        f"{kind}:{'x'.join('ABC'[: chip.axes])} ({chip.memory / _GIB:.0f} GiB and {chip.flops / 1e12:.0f} bfloat16 "
        "TFLOP/s per chip)"
        for kind, chip in CHIPS.items()
    ]
    return f"Known: {', '.join(kinds)}, and cpu:A, simulated devices on this machine's CPU."
