"""Where arrays lie on several devices: the axes of the mesh, and one table of what is divided over which.

Pairs are divided over `data` and `fsdp`; each device of these computes pairs of its own and nobody else's. Parameters
are divided over `fsdp` (a layer's are gathered where it uses them) and over `tensor` (products are divided).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# From the outermost: products are divided over neighbours, and inside of what is written out over the other axes, where
# jaxlib 0.12 wants the axes of both in the mesh's order.
AXES = ("data", "fsdp", "sequence", "tensor")
BATCH = ("data", "fsdp")
_WHOLE_BELOW = 4096  # numbers of an array, or of one layer's part of it, that are not worth dividing

# What an axis of a weight counts -> the axis of the mesh that it is divided over. Where it does not come out even,
# it stays whole on that axis; fsdp then takes the longest other one that does.
RULES = {
    "embed": "fsdp",  # D, width of the residual stream
    "heads": "tensor",  # H x C, query heads and their channels
    "kv": "tensor",  # K x C, key and value heads
    "mlp": "tensor",  # F, width of the MLP
    "vocab": "tensor",  # V
    "experts": "tensor",  # E; then not mlp
    "layers": None,  # L, which a scan walks along
    "": None,
}

# The end of a parameter's path -> what its axes count, without that of the layers. Vectors and norms stay whole.
_LAYERS = re.compile(r"^(decoder|encoder)\.layers\.")
_NORM = re.compile(r"(^|\.|_)norm\.")
_BITS = re.compile(r"\.(codes|scales)$")  # of few bits, for a weight: a matrix, or its numbers end to end
_COUNTED = (
    (r"attention\.(distance_)?q\.weight", ("heads", "embed")),
    (r"attention\.(distance_k|k|v)\.weight", ("kv", "embed")),
    (r"attention\.o\.weight", ("embed", "heads")),
    (r"mlp(\.shared)?\.(gate|up)\.weight", ("mlp", "embed")),
    (r"mlp(\.shared)?\.down\.weight", ("embed", "mlp")),
    (r"mlp\.(gate|up)", ("experts", "mlp", "embed")),
    (r"mlp\.down", ("experts", "embed", "mlp")),
    (r"(router|shared_gate)\.weight", ("", "embed")),
    (r"(^|\.)embed\.weight", ("vocab", "embed")),
    (r"(position|type|distance)_embed\.weight", ("", "embed")),
    (r"(score|out)\.weight", ("", "embed")),
)


def axes_of(path: str, ndim: int) -> tuple[str, ...]:
    """What each axis of the parameter at this path counts; "" where the rules say nothing."""
    layers = ("layers",) if _LAYERS.search(path) else ()
    path = path.removesuffix(".codes")
    for pattern, axes in _COUNTED:
        if re.search(f"{pattern}$", path) and len(layers + axes) == ndim:
            return layers + axes
    return layers + ("",) * (ndim - len(layers))


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
    """

    mesh: Mesh
    moments_over: str | None = None
    whole_below: int = _WHOLE_BELOW

    def size(self, axis: str) -> int:
        return self.mesh.shape[axis]

    @property
    def shards(self) -> int:
        """How many devices, or groups of them, have pairs of their own."""
        return self.size("data") * self.size("fsdp")

    def spec(self, path: str, shape: Sequence[int], fsdp: str = "fsdp") -> PartitionSpec:
        """Over which axis of the mesh each axis of a parameter is divided; `fsdp` names the one that `embed` is."""
        axes = axes_of(path, len(shape))
        vector = len([axis for axis in axes if axis != "layers"]) < 2 and not _BITS.search(path)
        if vector or self._small(axes, shape) or _NORM.search(path):
            return PartitionSpec()
        places: list[str | None] = [None] * len(shape)
        for at, axis in enumerate(axes):
            over = fsdp if axis == "embed" else RULES[axis]
            if over not in places and self._divides(over, shape[at]):
                places[at] = over
        free = [at for at, axis in enumerate(axes) if places[at] is None and axis != "layers"]
        even = [at for at in free if self._divides(fsdp, shape[at])]
        if fsdp not in places and even:
            places[max(even, key=lambda at: shape[at])] = fsdp
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
            own = [name for name in names if name in like and shapes[name].shape == leaf.shape]
            return like[own[-1]] if own else self.whole

        return jax.tree_util.tree_map_with_path(place, state)

    def place(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        """Where one parameter lies."""
        return NamedSharding(self.mesh, self.spec(path, shape))

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


def shardings(mesh: Mesh, shapes: Mapping[str, Any]) -> dict[str, NamedSharding]:
    """Where each parameter of a flat dict lies on a mesh."""
    return ShardingPlan(mesh).params(shapes)


def placed(array: Any, sharding: NamedSharding) -> jax.Array:
    """An array that every process has, each device given its part; a copy, so that it can be donated.

    The shape of an array gets the place where that would lie. Of what lies on the disk each part is read by itself.
    """
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    if isinstance(array, jax.Array) and array.sharding == sharding:
        return array
    parts = [
        jax.numpy.array(array[index], device=device)
        for device, index in sharding.addressable_devices_indices_map(array.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def distributed(batch: Any, sharding: NamedSharding) -> Any:
    """A batch of NumPy arrays that every process has, on the devices."""
    return jax.tree.map(
        lambda leaf: jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index]), batch
    )


class Fetched:
    """An array of a mesh whose parts come to the host as they are asked for, by all processes together."""

    def __init__(self, array: jax.Array):
        self._array, self.shape, self.dtype, self.size = array, array.shape, array.dtype, array.size

    def __getitem__(self, index: Any) -> np.ndarray:
        return fetched(self._array[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(fetched(self._array), dtype)


def fetched(array: jax.Array) -> np.ndarray:
    """All of an array on every host. Where hosts hold parts of it, all of them must ask."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(_gathered(array, NamedSharding(array.sharding.mesh, PartitionSpec())))


@partial(jax.jit, static_argnums=1)
def _gathered(array: jax.Array, place: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(array, place)


def pieces(array: Any, most: int) -> Iterator[np.ndarray]:
    """All of an array of JAX's or NumPy's, along its first axis: at most so many bytes at a time, but one row at least.
    Where hosts hold parts of it, all of them must ask. JAX's come by way of copies on the device: what NumPy gets of an
    array itself stays with that on the host."""
    if isinstance(array, np.ndarray):
        yield array
    elif array.ndim == 0 or array.nbytes <= most:
        yield fetched(jax.numpy.copy(array))
    else:
        step = max(1, len(array) * most // array.nbytes)
        for start in range(0, len(array), step):
            yield fetched(array[start : start + step])
