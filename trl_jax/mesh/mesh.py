"""Device meshes: sharding rules, placing arrays, and gathering a layer's parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# ----------------------------------------------------------------------------------------------------
# Parameters of which a device holds a part, whole again where it computes.


class Parts:
    """Parameters, flat by path, that devices with rows of their own divide among them. What follows is called within a
    `jax.shard_map` over the axes of BATCH.

    Args:
        specs: where each lies. stacked: the paths of those that have an axis of layers in front, which are gathered by
            the layer, in the turn of the scan that uses it.

    Attributes:
        own, tensor: of each, the axes of BATCH alone, and `tensor` alone.
    """

    def __init__(self, specs: Mapping[str, PartitionSpec], stacked: Iterable[str]):
        self.own = {path: only(BATCH, spec) for path, spec in specs.items()}
        self.tensor = {path: only(("tensor",), spec) for path, spec in specs.items()}
        self._stacked = frozenset(stacked)

    def of(self, params: Mapping[str, Any]) -> dict[str, PartitionSpec]:
        """How these are divided."""
        return {path: self.own[path] for path in params}

    def with_whole(self, function: Callable, parameters: int = 1) -> Callable:
        """The function, of whose arguments the first ones are `parameters`, of which a device holds a part."""

        def run(*arguments):
            whole = [
                {path: self._whole(path, array) for path, array in params.items()} for params in arguments[:parameters]
            ]
            with layers_gathered_by(self._whole_layer):
                return function(*whole, *arguments[parameters:])

        return run

    def _whole(self, path: str, array: jax.Array) -> jax.Array:
        return array if path in self._stacked else _gather_layer_array(array, self.own[path], self.tensor[path])

    def _whole_layer(self, path: str, array: jax.Array) -> jax.Array:
        """One layer's of the stacked parameter at `path` in the model that is traced: its own, or one that it shares
        with the model that trains."""
        for stack in (model_prefix() + path, path):
            if stack in self._stacked:
                return _gather_layer_array(
                    array, *(PartitionSpec(*spec[stack][1:]) for spec in (self.own, self.tensor))
                )
        return array  # an adapter's, which came whole


def only(axes: tuple[str, ...], spec: PartitionSpec) -> PartitionSpec:
    """The spec without other axes."""
    return PartitionSpec(*(axis if axis in axes else None for axis in spec))


def each_part(tensor: PartitionSpec, collective: Callable) -> Callable:
    """A collective over the axes of examples, for each part over `tensor` alone: XLA would gather that one, too."""
    if "tensor" not in tensor:
        return collective
    return jax.shard_map(collective, in_specs=tensor, out_specs=tensor, axis_names={"tensor"}, check_vma=False)


def _gather_layer_array(array: jax.Array, own: PartitionSpec, tensor: PartitionSpec) -> jax.Array:
    at = [(place, axis) for place, axis in enumerate(own) if axis is not None]
    if not at:
        return array
    [(place, axis)] = at
    return each_part(tensor, lambda part: jax.lax.all_gather(part, axis, axis=place, tiled=True))(array)


# ----------------------------------------------------------------------------------------------------
# Where arrays lie on several devices: the axes of the mesh, and the logical axes of parameters that they divide.


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


# ----------------------------------------------------------------------------------------------------
# Arrays of which a device holds a part: the axes that divide products and texts, and how a layer gets its whole
# parameters.


TENSOR, SEQUENCE = "tensor", "sequence"

# (path of a stacked parameter, the part of one layer's that a device holds) -> all of that layer's.
Gather = Callable[[str, Any], Any]
_gather: ContextVar[Gather | None] = ContextVar("gather", default=None)
_model: ContextVar[str] = ContextVar("model", default="")


@contextlib.contextmanager
def layers_gathered_by(gather: Gather) -> Iterator[None]:
    """Set while a step is traced: models, which know no mesh, ask for a layer's parameters in the turn of the loop that
    uses them."""
    token = _gather.set(gather)
    try:
        yield
    finally:
        _gather.reset(token)


@contextlib.contextmanager
def layers_of(prefix: str) -> Iterator[None]:
    """Set while another of a step's models is traced, the paths of whose own parameters begin with `prefix`."""
    token = _model.set(prefix)
    try:
        yield
    finally:
        _model.reset(token)


def model_prefix() -> str:
    """The one that is set; "" for the model that trains."""
    return _model.get()


def layer_gather() -> Gather | None:
    """The one that is set; None where every device holds all of each parameter."""
    return _gather.get()


# ----------------------------------------------------------------------------------------------------
# Arrays on the devices of a mesh, and back on the host.


def owned(values: np.ndarray | jax.Array, device: jax.Device | None = None) -> jax.Array:
    """An array with memory of its own on a device, so that it can be donated; until it is ready, `values` may not
    change. `jnp.array` would compile the copy, one for each shape."""
    return jax.device_put(jax.device_put(values, device), may_alias=False)


def placed(array: Any, sharding: NamedSharding) -> jax.Array:
    """An array that every process has, each device given its part; a copy, so that it can be donated.

    The shape of an array gets the place where that would lie. Of what lies on the disk each part is read by itself.
    """
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    if isinstance(array, jax.Array) and array.sharding == sharding:
        return array
    indices = sharding.addressable_devices_indices_map(array.shape)
    parts = [owned(array[index], device) for device, index in indices.items()]
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


def pieces(array: Any, max_bytes: int) -> Iterator[np.ndarray]:
    """All of an array of JAX's or NumPy's, along its first axis: at most so many bytes at a time, but one row at least.
    Where hosts hold parts of it, all of them must ask. JAX's come by way of copies on the device: what NumPy gets of an
    array itself stays with that on the host."""
    if isinstance(array, np.ndarray):
        yield array
    elif array.ndim == 0 or array.nbytes <= max_bytes:
        yield fetched(jax.numpy.copy(array))
    else:
        step = max(1, len(array) * max_bytes // array.nbytes)
        for start in range(0, len(array), step):
            yield fetched(array[start : start + step])
