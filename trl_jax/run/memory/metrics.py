"""The memory metrics that `skip_memory_metrics=False` adds to a run's."""

from __future__ import annotations

import sys

from trl_jax.run.arguments.base_config import BaseConfig
from trl_jax.run.devices import run_device

try:
    import resource
except ImportError:  # Windows has no such count
    resource = None


def memory(stage: str, args: BaseConfig) -> dict[str, int]:
    """Peak memory in bytes of this process on the host and on its device, as far as the system and JAX count them."""
    if args.skip_memory_metrics:
        return {}
    metrics = {}
    if resource is not None:
        unit = 1 if sys.platform == "darwin" else 1024
        metrics[f"{stage}_mem_cpu_peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    on_device = run_device(args).memory_stats() or {}
    if "peak_bytes_in_use" in on_device:
        metrics[f"{stage}_mem_gpu_peak"] = on_device["peak_bytes_in_use"]
    return metrics
