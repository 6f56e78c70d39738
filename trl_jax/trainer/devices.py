"""The devices of a run, and how arguments divide it over them."""

from __future__ import annotations

import logging
from dataclasses import fields
from math import prod
from typing import TYPE_CHECKING

import jax

from trl_jax.core import parallel
from trl_jax.engine.mesh import Division, make_mesh

if TYPE_CHECKING:
    from trl_jax.trainer.base_config import BaseConfig

logger = logging.getLogger(__name__)


def run_devices(args: BaseConfig) -> list[jax.Device]:
    """All that a run may use, of every process."""
    return args.jax_devices()


def run_device(args: BaseConfig) -> jax.Device:
    """This process's first."""
    return jax.local_devices(backend="cpu" if args.use_cpu else None)[0]


def mesh_sizes(args: BaseConfig) -> dict[str, int]:
    """The size of each axis that the arguments name, or imply.

    Raises:
        ValueError: they do not come out even on the devices there are, or not with a DeepSpeed file's batch.
    """
    asked = parallel.asked({f.name: getattr(args, f.name) for f in fields(args)})
    devices = run_devices(args)
    sizes = parallel.settled(asked, len(devices), len({device.process_index for device in devices}))
    shards = sizes.get("data", 1) * sizes.get("fsdp", 1)
    pairs = shards * args.per_device_train_batch_size * args.gradient_accumulation_steps
    if asked.batch not in (None, pairs):
        raise ValueError(
            f"deepspeed sets train_batch_size to {asked.batch}, but {shards} devices x per_device_train_batch_size x "
            f'gradient_accumulation_steps = {pairs}. Write "auto" in the file.'
        )
    return sizes


def division_of(args: BaseConfig) -> Division | None:
    """How the run is divided; None where it has one device."""
    sizes = mesh_sizes(args)
    count = prod(sizes.values())
    if count == 1:
        return None
    asked = parallel.asked({f.name: getattr(args, f.name) for f in fields(args)})
    how = {} if asked.whole_below is None else {"whole_below": asked.whole_below}
    mesh = make_mesh(sizes, run_devices(args)[:count])
    return Division(mesh, "data" if asked.moments else None, **how)
