"""Where a model that no trainer has lies: on one device, or divided over those of a mesh."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from trl_jax.core.arguments.parallel import of_mesh_shape, settled
from trl_jax.core.layer_gather import SEQUENCE, TENSOR
from trl_jax.mesh.sharding import ShardingPlan, make_mesh


def sharding_plan(mesh_shape: str | Mapping[str, int] | None) -> ShardingPlan | None:
    """The plan of a mesh such as "data:2,fsdp:4" of all devices; None without one.

    Raises:
        ValueError: the sizes do not fit the number of devices, or divide texts.
    """
    asked = of_mesh_shape(mesh_shape)
    if asked is None:
        return None
    devices = jax.devices()
    sizes = settled(asked, len(devices), len({device.process_index for device in devices}))
    if sizes.get(SEQUENCE, 1) > 1:
        raise ValueError(
            f"mesh_shape={mesh_shape!r}: the axis sequence divides the texts of a training step. Give these devices to "
            "data or fsdp."
        )
    return ShardingPlan(make_mesh(sizes))


def check_heads(plan: ShardingPlan, heads: Mapping[str, int] | None, name: str) -> None:
    """Raise ValueError where the tensor axis does not divide the heads of the model of this name; `heads` is None of an
    exported program."""
    size = plan.size(TENSOR)
    if size == 1:
        return
    if heads is None:
        raise ValueError(
            f"mesh: tensor {size} divides products by name, and {name} runs as an exported program. Divide it with "
            "fsdp instead."
        )
    odd = {kind: count for kind, count in heads.items() if count % size}
    if odd:
        shown = " and ".join(f"{count} {kind}" for kind, count in odd.items())
        raise ValueError(
            f"mesh: tensor {size} does not divide the {shown} of {name}. Choose a tensor size that does, and give the "
            "rest to fsdp."
        )
