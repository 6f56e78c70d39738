"""What `skip_memory_metrics=False` adds to a run's metrics."""

from __future__ import annotations

import sys

from trl_jax.run.base_config import BaseConfig
from trl_jax.run.devices import run_device

try:
    import resource
except ImportError:  # Windows: what the host has held is not known there
    resource = None


def memory(stage: str, args: BaseConfig) -> dict[str, int]:
    """Bytes: the most this process has held on the host, where its system counts it, and its device, where JAX does."""
    if args.skip_memory_metrics:
        return {}
    found = {}
    if resource is not None:
        unit = 1 if sys.platform == "darwin" else 1024
        found[f"{stage}_mem_cpu_peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    on_device = run_device(args).memory_stats() or {}
    if "peak_bytes_in_use" in on_device:
        found[f"{stage}_mem_gpu_peak"] = on_device["peak_bytes_in_use"]
    return found
