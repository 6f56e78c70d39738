"""Scripts that torchrun, accelerate launch or deepspeed start: their configuration, and their processes.

Each of these starts a process for every device; one process of JAX drives all devices of a host. So the first process
goes on, with what the launcher was told about sharding, and the others end when they build their configuration.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.utils import strtobool

_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_SHARDING = ("deepspeed", "fsdp", "fsdp_config", "mesh_shape", "parallelism_config")
_TOLD = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")
_STRATEGIES = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}


def sharding_of_launcher(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that say what accelerate's launcher was told of DeepSpeed or FSDP; none where the script says how the
    run is divided itself."""
    if any(values.get(name) for name in _SHARDING):
        return {}
    if _is_on("ACCELERATE_USE_DEEPSPEED"):
        file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        return {"deepspeed": _stages() if file.lower() in ("none", "") else file}
    if _is_on("ACCELERATE_USE_FSDP"):
        strategy = os.environ.get("FSDP_SHARDING_STRATEGY", "none").lower()
        if strategy == "none":  # accelerate's second version
            strategy = "full_shard" if _is_on("FSDP_RESHARD_AFTER_FORWARD", "true") else "shard_grad_op"
        return {"fsdp": _STRATEGIES.get(strategy, strategy)}
    return {}


@contextlib.contextmanager
def launcher_aside() -> Iterator[None]:
    """A span in which nobody else sees what a launcher was told: transformers would ask DeepSpeed's package."""
    told = {name: os.environ.pop(name) for name in _TOLD if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(told)


@contextlib.contextmanager
def no_launcher() -> Iterator[None]:
    """A block for which no launcher has started several processes: building a configuration would end all but one."""
    set_aside = {name: os.environ.pop(name) for name in (*_RANKS, *_TOLD) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(set_aside)


def end_other_processes() -> int | None:
    """End this process if it is not the launcher's first; the first is alone from here on.

    Returns how many there were; None where no launcher has started several.

    Raises:
        ValueError: they are on several hosts, or talk to each other already.
        SystemExit: with code 0, in all but the first.
    """
    rank, local, world, local_world = (os.environ.get(name) for name in _RANKS)
    if int(world or 1) < 2:
        return None
    if local is None or local_world != world:
        raise ValueError(
            f"WORLD_SIZE={world} is set in the environment: several processes were started, but one takes all devices "
            "of a host. Start the script once a host, with python."
        )
    if _they_talk():
        raise ValueError(
            f"WORLD_SIZE={world} is set in the environment and the script has begun torch.distributed: several "
            "processes were started, but one takes all devices of a host. Start the script with python."
        )
    if int(rank or local) > 0:
        raise SystemExit(0)
    os.environ.update(dict(zip(_RANKS, ("0", "0", "1", "1"), strict=True)))
    return int(world)


def note_of(processes: int, devices: int, rows: int) -> str:
    """The line about processes that have ended, where a step would have had `rows` rows for each of them."""
    text = f"{processes} processes were started; one drives all devices of a host, so the others have ended."
    if processes == devices:
        return text
    total = processes * rows
    way = f"per_device_train_batch_size={total // devices}" if total % devices == 0 else "another batch size"
    return (
        f"{text} JAX has {devices} device{'s' if devices > 1 else ''} here: a step has {devices} x {rows} rows, where "
        f"{processes} processes would have had {processes} x {rows}. Set {way} for the same batch."
    )


def _stages() -> dict[str, Any]:
    """The answers to accelerate's own questions about DeepSpeed."""
    zero: dict[str, Any] = {"stage": int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))}
    for key in ("optimizer", "param"):
        device = os.environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{key.upper()}_DEVICE", "none")
        if device != "none":
            zero[f"offload_{key}"] = {"device": device}
    return {"zero_optimization": zero}


def _is_on(name: str, default: str = "false") -> bool:
    return bool(strtobool(os.environ.get(name, default)))


def _they_talk() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
