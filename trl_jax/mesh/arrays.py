"""Arrays on the devices of a mesh, and back on the host."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


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
