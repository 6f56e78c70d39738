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

from trl_jax.nn.attention import cudnn
from trl_jax.plan import hlo
from trl_jax.plan.chips import Chip, Topology

# libtpu queries which TPU the machine has. These answer for a machine without one; they do not affect the compile
# target.
_NO_TPU_HERE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_TOO_LARGE = (  # libtpu's errors: after compiling and, for temporaries only, before
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
    room: bytes that the program may use. On a TPU it is known only if the program does not fit; then `peak` is what it
        needs, and the other fields are None.
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
        return _no_gpu_compiler(topology)
    if topology.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        return 'The TPU compiler is not installed: pip install "trl_jax[tpu]"'
    return None


def prepare(topology: Topology) -> None:
    """Make JAX use this machine's CPU, with as many simulated devices as a `cpu:A` topology has.

    Call this before JAX initializes its backends.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # the plan reports the compile time
    if topology.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", topology.devices)
    elif topology.platform == "gpu":
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # load the GPU plugin without a GPU


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
        cpus = jax.devices("cpu")
        if len(cpus) < topology.devices:
            raise ValueError(
                f"{topology.name}: JAX has already started with {len(cpus)} CPU device(s). Call "
                f"trl_jax.plan.compile.prepare first, or set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={topology.devices}."
            )
        return cpus[: topology.devices]
    if no_compiler(topology) is not None:
        return [DeviceStub(number, topology.platform, topology.kind) for number in range(topology.devices)]
    if topology.platform == "gpu":
        return gpu_devices(topology)
    for name, value in _NO_TPU_HERE.items():
        os.environ.setdefault(name, value)
    chips_per_host = [min(2, size) for size in (*topology.shape, 1, 1)[:2]] + [1]  # at most 2x2
    try:
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=topology.name, chips_per_host_bounds=chips_per_host
        )
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"--topology {topology.name}: the TPU compiler does not know this shape: {error}") from error
    return description.devices


def parse_memory_error(error: str) -> tuple[int, int] | None:
    """Parse the bytes required and available from the compiler's error; None for any other error."""
    for pattern in _TOO_LARGE:
        if match := re.search(pattern, error):
            used, room = (int(float(match[group]) * _UNITS[match[group + 1]]) for group in (1, 3))
            return used, room
    return None


def compiled(traced: jax.stages.Traced, topology: Topology) -> Compiled:
    """Compile a traced program for the topology, and return only the figures."""
    return compile_program(traced, topology)[0]


def compile_program(traced: jax.stages.Traced, topology: Topology) -> tuple[Compiled, jax.stages.Compiled | None]:
    """Compile a traced program for the topology. The program is None if it does not fit into memory.

    Raises:
        jax.errors.JaxRuntimeError: the compiler failed for a reason other than memory.
    """
    on_gpu = topology.platform == "gpu"
    start, lowered = time.monotonic(), traced.lower(lowering_platforms=("cuda" if on_gpu else topology.platform,))
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        required_and_available = parse_memory_error(str(error))
        if required_and_available is None:
            raise
        return Compiled(time.monotonic() - start, required_and_available[0], False, required_and_available[1]), None
    seconds, memory = time.monotonic() - start, program.memory_analysis()
    arguments, allocated = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    # The CPU compiler reports no peak, and a TPU's peak includes what is offloaded to the host.
    sum_buffers = topology.platform == "cpu" or memory.host_temp_size_in_bytes > 0
    # Results that do not reuse the memory of a donated argument
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = arguments + allocated + results if sum_buffers else memory.peak_memory_in_bytes
    fits, cost = None if topology.chip is None else True, hlo.cost(program.as_text())
    room = gpu_room(topology) if on_gpu else None  # XLA compiles for GPUs even if the program does not fit
    fits = fits if room is None else peak <= room
    return Compiled(seconds, peak, fits, room, arguments, allocated, cost), program


def device_bytes(leaves: Any) -> int:
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

    Assumes that matrix products run at peak bfloat16 speed; that arguments are read once, results written once, and
    temporaries both; and that collectives use all links at once, in one direction.
    """
    moved = compiled.arguments + outputs + 2 * compiled.temporary
    sent = sum(collective.sent for collective in compiled.cost.collectives)
    return Bound(compiled.cost.flops / chip.flops, moved / chip.bandwidth, sent / (chip.links / 2))


# Descriptions of NVIDIA GPUs, so that XLA compiles for GPUs that this machine does not have

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_GPUS_PER_HOST = 8  # at most
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


class _GpuSpec(NamedTuple):
    """Facts of SXM modules, from NVIDIA's datasheets and the compute capability table of the CUDA programming guide.

    capability: major and minor.
    cores: streaming multiprocessors.
    shared, block: bytes of shared memory per multiprocessor, and per block that opts in to more than 48 KiB.
    cache: bytes of L2 cache.
    clock: GHz.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    shared: int
    block: int
    cache: int
    clock: float


_GPU_SPECS = {
    "a100": _GpuSpec("NVIDIA A100-SXM4-80GB", (8, 0), 108, 164 * 1024, 163 * 1024, 40 * 2**20, 1.41),
    "h100": _GpuSpec("NVIDIA H100 80GB HBM3", (9, 0), 132, 228 * 1024, 227 * 1024, 50 * 2**20, 1.98),
    "h200": _GpuSpec("NVIDIA H200", (9, 0), 132, 228 * 1024, 227 * 1024, 50 * 2**20, 1.98),
}


def _no_gpu_compiler(topology: Topology) -> str | None:
    """Why this machine cannot compile for the topology; None if it can."""
    if not any(map(_is_installed, _PLUGINS)):
        return 'XLA\'s compiler for NVIDIA GPUs is not installed: pip install "trl_jax[cuda]", no GPU is needed'
    try:
        gpu_devices(topology)
    except RuntimeError as error:  # includes JaxRuntimeError
        return f"XLA's compiler for NVIDIA GPUs does not start: {str(error).partition(chr(10))[0]}"
    return None


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec("jax_plugins") is not None and importlib.util.find_spec(module) is not None


def gpu_devices(topology: Topology) -> list[jax.Device]:
    """Devices to compile for, at most eight per host. Also selects the attention kernels of these GPUs."""
    gpu, count = _GPU_SPECS[topology.kind], topology.devices
    per_host = max(number for number in range(1, _GPUS_PER_HOST + 1) if count % number == 0)
    options = {"topology": f"1x{count // per_host}x{per_host}", "target_config": gpu_description(topology)}
    gpus = topologies.get_topology_desc(platform="cuda", topology_name="", **options).devices
    major, minor = gpu.capability
    cudnn.compile_for(float(f"{major}.{minor}"))
    return gpus


def gpu_room(topology: Topology) -> int:
    """Bytes of GPU memory that XLA preallocates, which is all that a program can use."""
    return int(float(os.environ.get(_FRACTION, 0.75)) * topology.chip.memory)


def gpu_description(topology: Topology) -> str:
    """The text of XLA's GpuTargetConfigProto."""
    gpu, chip = _GPU_SPECS[topology.kind], topology.chip
    major, minor = gpu.capability
    return f"""
gpu_device_info {{
  name: "{gpu.name}" device_vendor: "NVIDIA Corporation" device_address_bits: 64
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {gpu.cores} fpus_per_core: {128 if major == 9 else 64} clock_rate_ghz: {gpu.clock}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {gpu.shared} shared_memory_per_block_optin: {gpu.block}
  l2_cache_size: {gpu.cache} memory_bandwidth: {int(chip.bandwidth)} device_memory_size: {int(chip.memory)}
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""
