"""Device meshes: sharding rules, placing arrays, and gathering the parameters of a layer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# Sharded parameters inside shard_map, gathered where they are used


class ShardedParams:
    """Parameters, flat by path, that are sharded over the batch axes; used inside a `jax.shard_map` over BATCH.

    Args:
        specs: the partition spec of each parameter.
        stacked: paths of parameters with a leading axis of layers, which are gathered layer by layer inside the scan.

    Attributes:
        own, tensor: each spec restricted to the axes of BATCH, and to `tensor`.
    """

    def __init__(self, specs: Mapping[str, PartitionSpec], stacked: Iterable[str]):
        self.own = {path: only(BATCH, spec) for path, spec in specs.items()}
        self.tensor = {path: only(("tensor",), spec) for path, spec in specs.items()}
        self._stacked = frozenset(stacked)

    def of(self, params: Mapping[str, Any]) -> dict[str, PartitionSpec]:
        """The partition specs of these parameters."""
        return {path: self.own[path] for path in params}

    def with_whole(self, function: Callable, parameters: int = 1) -> Callable:
        """Wrap a function so that its first `parameters` arguments, dicts of sharded parameters, arrive gathered."""

        def run(*arguments):
            gathered = [
                {path: self._gather_array(path, array) for path, array in params.items()}
                for params in arguments[:parameters]
            ]
            with layers_gathered_by(self._gather_stacked_layer):
                return function(*gathered, *arguments[parameters:])

        return run

    def _gather_array(self, path: str, array: jax.Array) -> jax.Array:
        return array if path in self._stacked else _gather_layer_array(array, self.own[path], self.tensor[path])

    def _gather_stacked_layer(self, path: str, array: jax.Array) -> jax.Array:
        """Gather one layer of the stacked parameter at `path` of the model being traced: its own parameter, or one that
        it shares with the model being trained."""
        for stack in (model_prefix() + path, path):
            if stack in self._stacked:
                return _gather_layer_array(
                    array, *(PartitionSpec(*spec[stack][1:]) for spec in (self.own, self.tensor))
                )
        return array  # belongs to an adapter and was gathered with the rest


def only(axes: tuple[str, ...], spec: PartitionSpec) -> PartitionSpec:
    """The spec with only these axes."""
    return PartitionSpec(*(axis if axis in axes else None for axis in spec))


def each_part(tensor: PartitionSpec, collective: Callable) -> Callable:
    """Apply a collective over the batch axes to each `tensor` shard separately; XLA would gather that axis, too."""
    if "tensor" not in tensor:
        return collective
    return jax.shard_map(collective, in_specs=tensor, out_specs=tensor, axis_names={"tensor"}, check_vma=False)


def _gather_layer_array(array: jax.Array, spec: PartitionSpec, tensor: PartitionSpec) -> jax.Array:
    sharded = [(dimension, axis) for dimension, axis in enumerate(spec) if axis is not None]
    if not sharded:
        return array
    [(dimension, axis)] = sharded
    return each_part(tensor, lambda part: jax.lax.all_gather(part, axis, axis=dimension, tiled=True))(array)


# Sharding rules: mesh axes, and the logical parameter axes that they shard

# Outermost first. Tensor-parallel products communicate between neighbors, so `tensor` comes last; and jaxlib 0.12
# requires that axes inside a shard_map over the other axes follow the order of the mesh.
AXES = ("data", "fsdp", "sequence", "tensor")
BATCH = ("data", "fsdp")
_WHOLE_BELOW = 4096  # smaller arrays (per layer, for stacked layers) are not worth sharding

# Logical axis of a parameter -> mesh axis that shards it. An axis that does not divide evenly stays whole; fsdp then
# shards the longest other axis that does.
RULES = {
    "embed": "fsdp",  # width of the residual stream
    "heads": "tensor",  # query heads and their channels
    "kv": "tensor",  # key and value heads and their channels
    "mlp": "tensor",  # width of the MLP
    "vocab": "tensor",
    "experts": "tensor",  # takes precedence over mlp
    "layers": None,  # scanned over
    "norm": None,  # norms are replicated
    "flat": None,  # a flattened matrix
    "": None,
}


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with these axis sizes; axes that are not named have size 1. Devices default to `jax.devices()`.

    Raises:
        ValueError: unknown axis, or wrong number of devices.
    """
    unknown = [axis for axis in sizes if axis not in AXES]
    if unknown:
        raise ValueError(f"Unknown mesh axis {unknown[0]!r}: the axes of a mesh are {', '.join(AXES)}.")
    devices = jax.devices() if devices is None else devices
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    if prod(shape) != len(devices):
        raise ValueError(f"A mesh of {dict(sizes)} needs {prod(shape)} devices, but there are {len(devices)}.")
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


@dataclass(frozen=True)
class ShardingPlan:
    """How a training run is sharded over the devices of a mesh.

    Attributes:
        moments_over: axis that shards gradients and optimizer state even if it replicates parameters (ZeRO 1 and 2);
            None shards them like the parameters.
        whole_below: arrays with fewer elements (per layer) are replicated.
        axes: path -> logical axes of the parameter, keys of RULES; parameters that are missing have none.
    """

    mesh: Mesh
    moments_over: str | None = None
    whole_below: int = _WHOLE_BELOW
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def size(self, axis: str) -> int:
        return self.mesh.shape[axis]

    @property
    def shards(self) -> int:
        """The number of devices, or groups of devices, with examples of their own."""
        return self.size("data") * self.size("fsdp")

    def scanned(self, path: str) -> bool:
        """Whether a parameter belongs to stacked layers, which are scanned over."""
        return "layers" in self.axes.get(path, ())

    def spec(self, path: str, shape: Sequence[int], fsdp: str = "fsdp") -> PartitionSpec:
        """The mesh axis that shards each axis of a parameter; `fsdp` names the mesh axis used for "embed"."""
        return self._spec(self.axes.get(path, ()), shape, fsdp)

    def _spec(self, axes: Sequence[str], shape: Sequence[int], fsdp: str = "fsdp") -> PartitionSpec:
        axes = axes or ("",) * len(shape)
        vector = len([axis for axis in axes if axis != "layers"]) < 2 and "flat" not in axes
        if vector or "norm" in axes or self._small(axes, shape):
            return PartitionSpec()
        assigned: list[str | None] = [None] * len(shape)
        for dimension, axis in enumerate(axes):
            mesh_axis = fsdp if axis == "embed" else RULES[axis]
            if mesh_axis not in assigned and self._divides(mesh_axis, shape[dimension]):
                assigned[dimension] = mesh_axis
        free = [dimension for dimension, axis in enumerate(axes) if assigned[dimension] is None and axis != "layers"]
        even = [dimension for dimension in free if self._divides(fsdp, shape[dimension])]
        if fsdp not in assigned and even:
            assigned[max(even, key=lambda dimension: shape[dimension])] = fsdp
        return PartitionSpec(*assigned)

    def _small(self, axes: Sequence[str], shape: Sequence[int]) -> bool:
        return prod(size for size, axis in zip(shape, axes, strict=True) if axis != "layers") < self.whole_below

    def _divides(self, mesh_axis: str | None, size: int) -> bool:
        return mesh_axis is not None and self.size(mesh_axis) > 1 and size % self.size(mesh_axis) == 0

    def params(self, shapes: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """The sharding of each parameter; `shapes` is a flat dict, by path, of anything with a shape."""
        return {path: NamedSharding(self.mesh, self.spec(path, leaf.shape)) for path, leaf in shapes.items()}

    def gradients(self, shapes: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """The sharding of each gradient and each optimizer moment."""
        fsdp_axis = self.moments_over or "fsdp"
        return {path: NamedSharding(self.mesh, self.spec(path, leaf.shape, fsdp_axis)) for path, leaf in shapes.items()}

    def state(self, state: Any, shapes: Mapping[str, Any]) -> Any:
        """The sharding of each optimizer state array: like the parameter of the same path and shape, else whole."""
        like = self.gradients(shapes)

        def sharding(path: tuple, leaf: Any) -> NamedSharding:
            names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            params = [name for name in names if name in like and shapes[name].shape == leaf.shape]
            return like[params[-1]] if params else self.whole

        return jax.tree_util.tree_map_with_path(sharding, state)

    def sharding_of(self, axes: Sequence[str], shape: Sequence[int]) -> NamedSharding:
        """The sharding of a parameter with these logical axes. Without any, it is the default of parameters."""
        return NamedSharding(self.mesh, self._spec(axes, shape))

    def placed(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Parameters, moved to their shardings."""
        shardings = self.params(params)
        return {path: placed(array, shardings[path]) for path, array in params.items()}

    def placed_state(self, state: Any, params: Mapping[str, Any]) -> Any:
        """An optimizer state, moved to its sharding."""
        return jax.tree.map(placed, state, self.state(state, params))

    @property
    def whole(self) -> NamedSharding:
        """Replicated on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """The sharding of a step's arrays `[passes, shards, ...]`."""
        return NamedSharding(self.mesh, PartitionSpec(None, BATCH))

    @property
    def rows(self) -> NamedSharding:
        """The sharding of arrays `[shards, ...]`, or of rows that divide evenly."""
        return NamedSharding(self.mesh, PartitionSpec(BATCH))


# Context for traced models, which do not know the mesh

TENSOR, SEQUENCE = "tensor", "sequence"

# (path of a stacked parameter, this device's shard of one layer) -> the whole layer
Gather = Callable[[str, Any], Any]
_gather: ContextVar[Gather | None] = ContextVar("gather", default=None)
_model: ContextVar[str] = ContextVar("model", default="")


@contextlib.contextmanager
def layers_gathered_by(gather: Gather) -> Iterator[None]:
    """Set how layer parameters are gathered while a step is traced. Models call it inside the scan over layers."""
    token = _gather.set(gather)
    try:
        yield
    finally:
        _gather.reset(token)


@contextlib.contextmanager
def layers_of(prefix: str) -> Iterator[None]:
    """Set while a second model of the step is traced whose parameter paths begin with `prefix`."""
    token = _model.set(prefix)
    try:
        yield
    finally:
        _model.reset(token)


def model_prefix() -> str:
    """The current prefix; "" for the model being trained."""
    return _model.get()


def layer_gather() -> Gather | None:
    """The current gather function; None if every device holds whole parameters."""
    return _gather.get()


# Moving arrays between hosts and the devices of a mesh


def owned(values: np.ndarray | jax.Array, device: jax.Device | None = None) -> jax.Array:
    """Copy to a device into a buffer that can be donated. Do not modify `values` until the copy is ready. `jnp.array`
    would compile a copy program per shape."""
    return jax.device_put(jax.device_put(values, device), may_alias=False)


def like(array: jax.Array, values: np.ndarray) -> jax.Array:
    """Put values, which every process has, on the devices of `array`, in its dtype. The result can be donated."""
    values = values.astype(array.dtype, copy=False)
    return placed(values, array.sharding) if isinstance(array.sharding, NamedSharding) else owned(values)


def placed(array: Any, sharding: NamedSharding) -> jax.Array:
    """Shard an array that every process has. The result is a copy, so that it can be donated, unless the array already
    has this sharding.

    A ShapeDtypeStruct is returned with the sharding. From an array on disk, each shard is read separately.
    """
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    if isinstance(array, jax.Array) and array.sharding == sharding:
        return array
    indices = sharding.addressable_devices_indices_map(array.shape)
    parts = [owned(array[index], device) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def distributed(batch: Any, sharding: NamedSharding) -> Any:
    """Shard a batch of NumPy arrays that every process has."""
    return jax.tree.map(
        lambda leaf: jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index]), batch
    )


class Fetched:
    """A sharded array that is fetched to the host by slices; all processes must take part."""

    def __init__(self, array: jax.Array):
        self._array, self.shape, self.dtype, self.size = array, array.shape, array.dtype, array.size

    def __getitem__(self, index: Any) -> np.ndarray:
        return fetched(self._array[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(fetched(self._array), dtype, copy=copy)


def spans_hosts(array: jax.Array) -> bool:
    """Whether hosts hold different shards of an array."""
    return isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated)


def fetched(array: jax.Array) -> np.ndarray:
    """The whole array, on every host. If hosts hold different shards, all of them must call this."""
    if not spans_hosts(array):
        return np.asarray(array)
    return np.asarray(_replicate(array, NamedSharding(array.sharding.mesh, PartitionSpec())))


@partial(jax.jit, static_argnums=1)
def _replicate(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(array, sharding)


def pieces(array: Any, max_bytes: int) -> Iterator[np.ndarray]:
    """Yield a JAX or NumPy array in slices along its first axis, of at most `max_bytes` or one row. If hosts hold
    different shards, all of them must call this. JAX arrays are copied on the device first: NumPy's view of an array
    itself would stay cached on the host for as long as the array lives."""
    if isinstance(array, np.ndarray):
        yield array
    elif array.ndim == 0 or array.nbytes <= max_bytes:
        yield fetched(jax.numpy.copy(array))
    else:
        step = max(1, len(array) * max_bytes // array.nbytes)
        for start in range(0, len(array), step):
            yield fetched(array[start : start + step])


# The target platform, and workarounds for collectives and kernels on a mesh


def platform() -> str:
    """The platform to compile for, "cpu", "gpu" or "tpu". A mesh decides, even one of devices that are not present."""
    mesh_device, default = jax.sharding.get_abstract_mesh().abstract_device, jax.config.jax_default_device
    if mesh_device is not None:
        return mesh_device.platform
    return jax.default_backend() if default is None else default.platform


def on_each_device(call: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Run `call` per device over the mesh axes that are left to the compiler. The compiler cannot partition a kernel,
    and JAX's own partitioning rules for one do not work inside a shard_map over other axes."""
    axes = set(jax.sharding.get_abstract_mesh().auto_axes)
    if not axes:
        return call
    return jax.shard_map(call, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def as_summed(value: jax.Array) -> jax.Array:
    """Cast a value to the dtype in which devices sum it. On a CPU, 16-bit values are summed in float32: XLA would do
    that itself, but crashes if the sum is in a shard_map (jaxlib 0.10 to 0.12)."""
    is_half = value.dtype in (jnp.bfloat16, jnp.float16) and platform() == "cpu"
    return value.astype(jnp.float32) if is_half else value


def psum(value: jax.Array, axis: str) -> jax.Array:
    """`jax.lax.psum`, in the dtype of `as_summed`."""
    return jax.lax.psum(as_summed(value), axis).astype(value.dtype)
