"""A table of accelerators with their published figures, which `trl-jax plan` compares with."""

from __future__ import annotations

import math
import re
from typing import NamedTuple


class Chip(NamedTuple):
    """Attributes:
    flops: dense bfloat16 operations a second.
    memory: bytes.
    bandwidth: bytes a second between the chip and its memory.
    links: bytes a second to other chips, both directions together.
    axes: numbers in the shape of a topology, 2 for "4x4".
    source: address of the figures.
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
    # SXM modules. NVIDIA's datasheets give twice these FLOPs, with sparsity (but for the A100, where both stand), and
    # memory in round GB; the driver has the MiB given here (thundergolfer.com/blog/nvidia-gpu-memory-capacity).
    "a100": Chip(312e12, 81_920 * _MIB, 2039e9, 600e9, 1, _NVIDIA + "a100"),
    "h100": Chip(989.4e12, 81_559 * _MIB, 3350e9, 900e9, 1, _NVIDIA + "h100"),
    "h200": Chip(989.4e12, 143_771 * _MIB, 4800e9, 900e9, 1, _NVIDIA + "h200"),
}
SIMULATED = "cpu"  # simulated devices on this machine's CPU: they show how arrays are divided, not speed or memory


class Topology(NamedTuple):
    """`chip` is None for simulated devices, whose number is `shape`."""

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
        if self.chip is None:
            return "cpu"
        return "gpu" if self.chip.axes == 1 else "tpu"


def topology(name: str) -> Topology:
    """The topology of a name such as "v5e:4x4", "h100:8" or "cpu:8".

    Raises:
        ValueError: the name is unknown; the text lists the known ones.
    """
    match = re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+)*)", name)
    kind, sizes = match.groups() if match else (None, "")
    shape = tuple(map(int, sizes.split("x"))) if sizes else ()
    if kind not in (*CHIPS, SIMULATED) or 0 in shape:
        raise ValueError(f"--topology {name} is unknown. {known()}")
    chip = CHIPS.get(kind)
    wanted = chip.axes if chip else 1
    if len(shape) != wanted:
        example = f"{kind}:{'x'.join('2' * wanted)}"
        raise ValueError(f"--topology {name}: wanted a shape as in {example}. {known()}")
    return Topology(name, kind, shape, chip)


def known() -> str:
    """A sentence that lists every kind of chip with its memory and FLOPs."""
    kinds = [
        f"{kind}:{'x'.join('ABC'[: chip.axes])} ({chip.memory / _GIB:.0f} GiB and {chip.flops / 1e12:.0f} bfloat16 "
        "TFLOP/s a chip)"
        for kind, chip in CHIPS.items()
    ]
    return f"Known are {', '.join(kinds)}, and cpu:A, simulated devices on this machine's CPU."
