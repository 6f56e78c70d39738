"""Compile the programs of a planned run for devices that this machine does not have."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from trl_jax.plan import gpu, hlo
from trl_jax.plan.chips import Chip, Topology

# libtpu queries which TPU the machine has. These answer on a machine without one; the compile target is independent.
_NO_TPU_HERE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_TOO_LARGE = (  # libtpu's errors: after compiling and, for temporaries alone, before
    r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm",
    r"required for HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)",
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Compiled(NamedTuple):
    """The compiler's figures for a program. Bytes are per device.

    seconds: compile time.
    peak: the most bytes alive at once, including arguments.
    arguments: bytes of the arguments, with the padding of the device's layouts.
    allocated: sum of the temporary buffers, some of which reuse the same memory.
    fits: None if there is no memory limit.
    room: on a GPU, the bytes that a program may use. On a TPU, set only if the program does not fit: what was
        available, while `peak` is what was required and the remaining fields are None.
    """

    seconds: float
    peak: int
    fits: bool | None
    room: int | None = None
    arguments: int | None = None
    allocated: int | None = None
    cost: hlo.Cost | None = None

    @property
    def temporary(self) -> int | None:
        """Bytes alive at the peak, without the arguments; None if unknown."""
        return None if self.arguments is None else self.peak - self.arguments


def no_compiler(topology: Topology) -> str | None:
    """Why this machine cannot compile for the topology; None if it can."""
    if topology.platform == "gpu":
        return gpu.no_compiler(topology)
    if topology.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        return 'The TPU compiler is not installed: pip install "trl_jax[tpu]"'
    return None


def prepare(topology: Topology) -> None:
    """Make JAX use this machine's CPU, with as many simulated devices as a `cpu:A` topology has.

    Call it before JAX looks for devices.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # the plan reports the compile time
    if topology.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", topology.devices)
    elif topology.platform == "gpu":
        gpu.prepare()


@dataclass(frozen=True)  # not a tuple: NumPy would treat it as a row of an array
class DeviceStub:
    """A device with just what a mesh needs, for plans that compile nothing."""

    id: int
    platform: str
    device_kind: str
    process_index: int = 0


def devices(topology: Topology) -> list[jax.Device | DeviceStub]:
    """Devices of the topology to compile for, or stubs if there is no compiler.

    Raises:
        ValueError: the compiler does not know the topology, or JAX has already started with fewer devices.
    """
    if topology.platform == "cpu":
        found = jax.devices("cpu")
        if len(found) < topology.devices:
            raise ValueError(
                f"{topology.name}: JAX has already started with {len(found)} CPU device(s). Call "
                f"trl_jax.plan.compile.prepare first, or set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={topology.devices}."
            )
        return found[: topology.devices]
    if no_compiler(topology) is not None:
        return [DeviceStub(number, topology.platform, topology.kind) for number in range(topology.devices)]
    if topology.platform == "gpu":
        return gpu.devices(topology)
    for name, value in _NO_TPU_HERE.items():
        os.environ.setdefault(name, value)
    chips_per_host = [min(2, size) for size in (*topology.shape, 1, 1)[:2]] + [1]  # at most 2x2
    try:
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=topology.name, chips_per_host_bounds=chips_per_host
        )
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"--topology {topology.name}: the TPU compiler does not know this shape: {error}") from error
    return found.devices


def of_refusal(error: str) -> tuple[int, int] | None:
    """Parse the bytes required and available from the compiler's error; None for any other error."""
    for pattern in _TOO_LARGE:
        if match := re.search(pattern, error):
            used, room = (int(float(match[at]) * _UNITS[match[at + 1]]) for at in (1, 3))
            return used, room
    return None


def compiled(traced: jax.stages.Traced, topology: Topology) -> Compiled:
    """Compile a traced program for the topology, and return the figures alone."""
    return compiled_program(traced, topology)[0]


def compiled_program(traced: jax.stages.Traced, topology: Topology) -> tuple[Compiled, jax.stages.Compiled | None]:
    """Compile a traced program for the topology. The program is None if it does not fit into memory.

    Raises:
        jax.errors.JaxRuntimeError: the compiler failed for another reason than memory.
    """
    on_gpu = topology.platform == "gpu"
    start, lowered = time.monotonic(), traced.lower(lowering_platforms=("cuda" if on_gpu else topology.platform,))
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        found = of_refusal(str(error))
        if found is None:
            raise
        return Compiled(time.monotonic() - start, found[0], False, found[1]), None
    seconds, memory = time.monotonic() - start, program.memory_analysis()
    arguments, allocated = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    # The CPU compiler reports no peak, and a TPU's peak includes what is offloaded to the host.
    summed = topology.platform == "cpu" or memory.host_temp_size_in_bytes > 0
    results = (
        memory.output_size_in_bytes - memory.alias_size_in_bytes
    )  # results that do not reuse the memory of a donated argument
    peak = arguments + allocated + results if summed else memory.peak_memory_in_bytes
    fits, cost = None if topology.chip is None else True, hlo.cost(program.as_text())
    room = gpu.room(topology) if on_gpu else None  # XLA compiles for GPUs even if the program does not fit
    fits = fits if room is None else peak <= room
    return Compiled(seconds, peak, fits, room, arguments, allocated, cost), program


def on_device(leaves: Any) -> int:
    """Bytes per device of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(leaves)
    )


class Bound(NamedTuple):
    """Lower bounds in seconds on the time of a step, from the chip's peak compute, memory bandwidth and links."""

    compute: float
    memory: float
    links: float

    @property
    def step(self) -> float:
        return max(self)


def bound(chip: Chip, compiled: Compiled, outputs: int) -> Bound:
    """The bound of a compiled step whose results take `outputs` bytes per device.

    It assumes products at peak bfloat16 speed; that arguments are read once, results written once, and temporaries
    both; and collectives that use all links at once, in one direction.
    """
    moved = compiled.arguments + outputs + 2 * compiled.temporary
    sent = sum(one.sent for one in compiled.cost.collectives)
    return Bound(compiled.cost.flops / chip.flops, moved / chip.bandwidth, sent / (chip.links / 2))
