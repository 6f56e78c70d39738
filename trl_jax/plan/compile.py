"""Compile the step of a planned run for devices that need not be there."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax.experimental import topologies

from trl_jax.plan import gpu, hlo
from trl_jax.plan.chips import Topology

# libtpu asks the machine which TPU it has. These answer where there is none; compilation is for the topology asked for.
_NO_TPU_HERE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_TOO_LARGE = (  # libtpu's errors after compiling and, for temporaries alone, before
    r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm",
    r"required for HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)",
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Compiled(NamedTuple):
    """The compiler's figures of a step; bytes are those of one device.

    seconds: how long compilation took. peak: the most bytes alive at once, arguments included. arguments: bytes of the
    step's arguments, padded as the device lays them out. allocated: the sum of its temporary buffers, some of which
    share memory one after another. fits: the verdict, None where there is no limit. room: of a GPU, what a program has
    there; of a TPU, where it does not fit, what the compiler had: peak is what it wanted then, and the rest is None.
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
        """Bytes alive at the peak besides the arguments; None where they are not known."""
        return None if self.arguments is None else self.peak - self.arguments


def no_compiler(topology: Topology) -> str | None:
    """The reason why this machine cannot compile for the topology; None where it can."""
    if topology.platform == "gpu":
        return gpu.no_compiler(topology)
    if topology.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        return 'TPUs\' compiler is not installed: pip install "trl_jax[tpu]"'
    return None


def prepare(topology: Topology) -> None:
    """Make JAX use this machine's CPU, as many simulated devices as a `cpu:A` topology has.

    Call it before JAX looks for devices.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # the plan reports how long compilation takes
    if topology.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", topology.devices)
    elif topology.platform == "gpu":
        gpu.prepare()


@dataclass(frozen=True)  # no tuple: NumPy would take it for a row of an array
class DeviceStub:
    """A device with no more than a mesh asks of it, where nothing is compiled."""

    id: int
    platform: str
    device_kind: str
    process_index: int = 0


def devices(topology: Topology) -> list[jax.Device | DeviceStub]:
    """Devices of the topology to compile for, or stubs to lay shapes out on where there is no compiler.

    Raises:
        ValueError: the compiler knows no such topology, or JAX has fewer devices already.
    """
    if topology.platform == "cpu":
        found = jax.devices("cpu")
        if len(found) < topology.devices:
            raise ValueError(
                f"{topology.name}: JAX has started with {len(found)} CPU device(s). Call "
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
        raise ValueError(f"--topology {topology.name}: the TPU compiler knows no such shape: {error}") from error
    return found.devices


def of_refusal(error: str) -> tuple[int, int] | None:
    """Parse the bytes wanted and the bytes available out of the compiler's error; None for another error."""
    for pattern in _TOO_LARGE:
        if match := re.search(pattern, error):
            used, room = (int(float(match[at]) * _UNITS[match[at + 1]]) for at in (1, 3))
            return used, room
    return None


def compiled(traced: jax.stages.Traced, topology: Topology) -> Compiled:
    """The figures of a traced step that is compiled for the topology; see `compiled_program`."""
    return compiled_program(traced, topology)[0]


def compiled_program(traced: jax.stages.Traced, topology: Topology) -> tuple[Compiled, jax.stages.Compiled | None]:
    """Compile a traced program for the topology; None where it needs more memory than there is.

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
    # The CPU's compiler reports no peak, and that of a TPU includes what is offloaded to the host.
    summed = topology.chip is None or memory.host_temp_size_in_bytes > 0
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes  # of which no argument gives the memory
    peak = arguments + allocated + results if summed else memory.peak_memory_in_bytes
    fits, cost = None if topology.chip is None else True, hlo.cost(program.as_text())
    room = gpu.room(topology) if on_gpu else None  # XLA compiles for GPUs whatever there is room for
    fits = fits if room is None else peak <= room
    return Compiled(seconds, peak, fits, room, arguments, allocated, cost), program
