"""Describe NVIDIA GPUs to XLA, so that it compiles for GPUs that this machine does not have."""

from __future__ import annotations

import importlib.util
import os
from typing import NamedTuple

import jax
from jax.experimental import topologies

from trl_jax.nn.attention import cudnn
from trl_jax.plan.chips import Topology

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_HOST = 8  # GPUs per host, at most
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


class _Facts(NamedTuple):
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


_FACTS = {
    "a100": _Facts("NVIDIA A100-SXM4-80GB", (8, 0), 108, 164 * 1024, 163 * 1024, 40 * 2**20, 1.41),
    "h100": _Facts("NVIDIA H100 80GB HBM3", (9, 0), 132, 228 * 1024, 227 * 1024, 50 * 2**20, 1.98),
    "h200": _Facts("NVIDIA H200", (9, 0), 132, 228 * 1024, 227 * 1024, 50 * 2**20, 1.98),
}


def prepare() -> None:
    """Let JAX load its GPU plugin on a machine without a GPU. Call it before JAX looks for devices."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def no_compiler(topology: Topology) -> str | None:
    """Why this machine cannot compile for the topology; None if it can."""
    if not any(map(_is_there, _PLUGINS)):
        return 'XLA\'s compiler for NVIDIA GPUs is not installed: pip install "trl_jax[cuda]", no GPU is needed'
    try:
        devices(topology)
    except RuntimeError as error:  # includes JaxRuntimeError
        return f"XLA's compiler for NVIDIA GPUs does not start: {str(error).partition(chr(10))[0]}"
    return None


def _is_there(module: str) -> bool:
    return importlib.util.find_spec("jax_plugins") is not None and importlib.util.find_spec(module) is not None


def devices(topology: Topology) -> list[jax.Device]:
    """Devices to compile for, at most eight per host. Also selects the attention kernels of these GPUs."""
    facts, count = _FACTS[topology.kind], topology.devices
    each = max(number for number in range(1, _HOST + 1) if count % number == 0)
    told = {"topology": f"1x{count // each}x{each}", "target_config": description(topology)}
    found = topologies.get_topology_desc(platform="cuda", topology_name="", **told).devices
    major, minor = facts.capability
    cudnn.compile_for(float(f"{major}.{minor}"))
    return found


def room(topology: Topology) -> int:
    """Bytes of GPU memory that XLA preallocates, which is all that a program can use."""
    return int(float(os.environ.get(_FRACTION, 0.75)) * topology.chip.memory)


def description(topology: Topology) -> str:
    """The text of XLA's GpuTargetConfigProto."""
    facts, chip = _FACTS[topology.kind], topology.chip
    major, minor = facts.capability
    return f"""
gpu_device_info {{
  name: "{facts.name}" device_vendor: "NVIDIA Corporation" device_address_bits: 64
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {facts.cores} fpus_per_core: {128 if major == 9 else 64} clock_rate_ghz: {facts.clock}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {facts.shared} shared_memory_per_block_optin: {facts.block}
  l2_cache_size: {facts.cache} memory_bandwidth: {int(chip.bandwidth)} device_memory_size: {int(chip.memory)}
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{facts.name}"
"""
