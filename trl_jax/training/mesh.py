"""The devices of a run, and how its arrays are sharded over them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import fields
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import jax

from trl_jax.config import devices
from trl_jax.hub.auto import check_heads
from trl_jax.mesh.mesh import SEQUENCE, ShardingPlan, make_mesh

if TYPE_CHECKING:
    from trl_jax.hub.backend import Backend
    from trl_jax.hub.pretrained import PreTrainedModel


logger = logging.getLogger(__name__)


class DeviceArguments(Protocol):
    """The part of a configuration that determines a run's devices."""

    use_cpu: bool
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    activation_offloading: bool
    tf32: bool
    device: Any

    def jax_devices(self) -> list[jax.Device]: ...


PROGRAMS_AT_ONCE = 4  # compiled in parallel while steps run


def compiles_ahead(device: str) -> bool:
    """Whether programs are compiled while steps run. Only on TPUs: a CPU is busy with the steps, and on GPUs XLA's
    autotuning times kernels on the device."""
    return device == "tpu"


def run_devices(args: DeviceArguments) -> list[jax.Device]:
    """All devices that the run may use, in all processes."""
    return args.jax_devices()


def run_device(args: DeviceArguments) -> jax.Device:
    """The first device of this process."""
    run_devices(args)  # joins the processes first
    return jax.local_devices(backend="cpu" if args.use_cpu else None)[0]


@contextlib.contextmanager
def on_device(args: DeviceArguments) -> Iterator[None]:
    """Compute on the run's device. float32 matrix products are as exact as torch's, unless tf32 is set."""
    precision = "tensorfloat32" if args.tf32 and args.device.type == "cuda" else "float32"
    with jax.default_device(run_device(args)), jax.default_matmul_precision(precision):
        yield


def check_division(sharding_plan: ShardingPlan | None, model: PreTrainedModel, overridden: frozenset[str]) -> None:
    """Raise ValueError if the tensor axis does not divide the model's heads, or if the sequence axis cannot be used
    because of the model or of methods that the script has `overridden`."""
    if sharding_plan is None:
        return
    _check_sequence(sharding_plan.size(SEQUENCE), model, overridden)
    check_heads(sharding_plan, model.backend.heads, model.name_or_path)


def _check_sequence(size: int, model: PreTrainedModel, overridden: frozenset[str]) -> None:
    if size == 1:
        return
    ways = "Give these devices to data or fsdp instead."
    if not model.backend.takes_stripes:
        raise ValueError(
            f"mesh: sequence {size} divides the tokens of a text over devices, which requires a native decoder with "
            f"attention in every layer; {model.name_or_path} is not one ({model.backend.name} backend). {ways}"
        )
    if overridden:
        raise ValueError(
            f"mesh: sequence {size} divides texts, and a script's own {min(overridden)} gets them whole. {ways}"
        )


def check_offloading(args: DeviceArguments, backend: Backend) -> None:
    """Raise ValueError if activation_offloading is set for a model without scanned layers; warn on a CPU, where it has
    no effect."""
    if not args.activation_offloading:
        return
    if backend.heads is None:
        raise ValueError(
            f"activation_offloading=True: this model runs on the {backend.name} backend, whose activations stay on the "
            "device. Leave it out."
        )
    if args.device.type == "cpu":
        logger.warning("activation_offloading has no effect on a CPU: its activations are in the host's memory.")


def describe(sharding_plan: ShardingPlan, params: dict, state: Any) -> str:
    """One line about the mesh, and each device's share of the weights and of the optimizer state."""
    mesh = ", ".join(f"{axis} {size}" for axis, size in sharding_plan.mesh.shape.items() if size > 1)
    parts = []
    for name, tree in (("weights", params), ("optimizer's state", state)):
        leaves = jax.tree.leaves(tree)
        per_device = sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
        parts.append(f"{_bytes(per_device)} of {_bytes(sum(leaf.nbytes for leaf in leaves))} of the {name}")
    kind = sharding_plan.mesh.devices.flat[0].device_kind
    return f"Mesh {mesh} on {sharding_plan.mesh.size} devices ({kind}): each holds {' and '.join(parts)}."


def _bytes(count: int) -> str:
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if count >= unit), (1e3, "kB"))
    return f"{count / unit:.1f} {name}"


def sharding_plan_of(args: DeviceArguments) -> ShardingPlan | None:
    """How the run is sharded over devices; None for a single device."""
    sizes = devices.mesh_sizes(args)
    count = prod(sizes.values())
    if count == 1:
        return None
    asked = devices.asked({f.name: getattr(args, f.name) for f in fields(args)})
    options = {} if asked.whole_below is None else {"whole_below": asked.whole_below}
    mesh = make_mesh(sizes, run_devices(args)[:count])
    return ShardingPlan(mesh, "data" if asked.moments else None, **options)
