"""Where arrays lie on several devices: the axes of the mesh, and the logical axes of parameters that they divide.

Examples are divided over `data` and `fsdp`; each device of these computes its own and nobody else's. Parameters are
divided over `fsdp` (a layer's are gathered where it uses them) and over `tensor` (products are divided).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trl_jax.mesh.arrays import placed

# From the outermost: products are divided over neighbours, and inside of what is written out over the other axes, where
# jaxlib 0.12 wants the axes of both in the mesh's order.
AXES = ("data", "fsdp", "sequence", "tensor")
BATCH = ("data", "fsdp")
_WHOLE_BELOW = 4096  # numbers of an array, or of one layer's part of it, that are not worth dividing

# Logical axis of a parameter -> the axis of the mesh that divides it. Where it does not come out even, it stays whole
# on that axis; fsdp then takes the longest other one that does.
RULES = {
    "embed": "fsdp",  # width of the residual stream
    "heads": "tensor",  # query heads and their channels
    "kv": "tensor",  # key and value heads and their channels
    "mlp": "tensor",  # width of the MLP
    "vocab": "tensor",
    "experts": "tensor",  # then not mlp
    "layers": None,  # a scan walks along them
    "norm": None,  # norms stay whole
    "flat": None,  # the numbers of a matrix, end to end
    "": None,
}


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of these sizes, by axis; axes that are not named have 1. Devices: JAX's own, in its order, unless given.

    Raises:
        ValueError: an axis that is none, or another number of devices.
    """
    unknown = [axis for axis in sizes if axis not in AXES]
    if unknown:
        raise ValueError(f"A mesh has no axis {unknown[0]!r}: its axes are {', '.join(AXES)}.")
    devices = jax.devices() if devices is None else devices
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    if prod(shape) != len(devices):
        raise ValueError(f"A mesh of {dict(sizes)} is for {prod(shape)} devices, and there are {len(devices)}.")
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


@dataclass(frozen=True)
class ShardingPlan:
    """How a run is divided over the devices of a mesh.

    Attributes:
        moments_over: the axis over which the optimizer's state, and gradients, are divided where parameters are whole
            on it (ZeRO 1 and 2); None leaves them as the parameters are.
        whole_below: arrays of fewer numbers, counted in one layer, stay whole.
        axes: by path the logical axes of parameters, keys of RULES; a parameter that is not there has none.
    """

    mesh: Mesh
    moments_over: str | None = None
    whole_below: int = _WHOLE_BELOW
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def size(self, axis: str) -> int:
        return self.mesh.shape[axis]

    @property
    def shards(self) -> int:
        """How many devices, or groups of them, have examples of their own."""
        return self.size("data") * self.size("fsdp")

    def scanned(self, path: str) -> bool:
        """Whether a parameter is of stacked layers, which a scan walks along."""
        return "layers" in self.axes.get(path, ())

    def spec(self, path: str, shape: Sequence[int], fsdp: str = "fsdp") -> PartitionSpec:
        """The axis of the mesh that divides each axis of a parameter; `fsdp` names the one that divides "embed"."""
        return self._spec(self.axes.get(path, ()), shape, fsdp)

    def _spec(self, axes: Sequence[str], shape: Sequence[int], fsdp: str = "fsdp") -> PartitionSpec:
        axes = axes or ("",) * len(shape)
        vector = len([axis for axis in axes if axis != "layers"]) < 2 and "flat" not in axes
        if vector or "norm" in axes or self._small(axes, shape):
            return PartitionSpec()
        places: list[str | None] = [None] * len(shape)
        for place, axis in enumerate(axes):
            over = fsdp if axis == "embed" else RULES[axis]
            if over not in places and self._divides(over, shape[place]):
                places[place] = over
        free = [place for place, axis in enumerate(axes) if places[place] is None and axis != "layers"]
        even = [place for place in free if self._divides(fsdp, shape[place])]
        if fsdp not in places and even:
            places[max(even, key=lambda place: shape[place])] = fsdp
        return PartitionSpec(*places)

    def _small(self, axes: Sequence[str], shape: Sequence[int]) -> bool:
        return prod(size for size, axis in zip(shape, axes, strict=True) if axis != "layers") < self.whole_below

    def _divides(self, over: str | None, size: int) -> bool:
        return over is not None and self.size(over) > 1 and size % self.size(over) == 0

    def params(self, shapes: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """Where each parameter lies; `shapes` is a flat dict, by path, of arrays or what has a shape."""
        return {path: NamedSharding(self.mesh, self.spec(path, leaf.shape)) for path, leaf in shapes.items()}

    def gradients(self, shapes: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """Where each gradient and each moment lies."""
        over = self.moments_over or "fsdp"
        return {path: NamedSharding(self.mesh, self.spec(path, leaf.shape, over)) for path, leaf in shapes.items()}

    def state(self, state: Any, shapes: Mapping[str, Any]) -> Any:
        """Where each array of an optimizer's state lies: as the parameter whose path and shape it has, else whole."""
        like = self.gradients(shapes)

        def place(where: tuple, leaf: Any) -> NamedSharding:
            names = [key.key for key in where if isinstance(key, jax.tree_util.DictKey)]
            params = [name for name in names if name in like and shapes[name].shape == leaf.shape]
            return like[params[-1]] if params else self.whole

        return jax.tree_util.tree_map_with_path(place, state)

    def place(self, axes: Sequence[str], shape: Sequence[int]) -> NamedSharding:
        """Where a parameter of these logical axes lies; without any, where one lies that does not say."""
        return NamedSharding(self.mesh, self._spec(axes, shape))

    def placed(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Parameters where they belong."""
        places = self.params(params)
        return {path: placed(array, places[path]) for path, array in params.items()}

    def placed_state(self, state: Any, params: Mapping[str, Any]) -> Any:
        """An optimizer's state where it belongs."""
        return jax.tree.map(placed, state, self.state(state, params))

    @property
    def whole(self) -> NamedSharding:
        """On every device all of it."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """A step's arrays `[passes, shards, ...]`."""
        return NamedSharding(self.mesh, PartitionSpec(None, BATCH))

    @property
    def rows(self) -> NamedSharding:
        """Arrays `[shards, ...]`, or rows that come out even."""
        return NamedSharding(self.mesh, PartitionSpec(BATCH))
