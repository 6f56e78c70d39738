"""Arrays on several devices from tensors on disk: each device's part is read by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from trl_jax.hub.checkpoint.tensor_map import TensorEntry

Index = tuple[slice, ...]
Read = Callable[[str, Index | None], np.ndarray]  # a tensor on disk, or a part of it
Placement = Callable[[tuple[str, ...], tuple[int, ...]], Any]  # a parameter's logical axes and shape -> its sharding


def read_sharded(
    read: Read,
    entry: TensorEntry,
    shape: tuple[int, ...],
    names: dict[str, str],
    sharding: Any,
    dtype: Any = np.float32,
) -> jax.Array:
    """One of our arrays, laid out as `sharding` says; only this process's devices get their parts.

    Besides the array, the host holds the part of one device; twice for a moment.
    """
    indices = sharding.addressable_devices_indices_map(shape)
    devices_of: dict[tuple, list[Any]] = {}
    for device, index in indices.items():
        ends = tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))
        devices_of.setdefault(ends, []).append(device)
    parts = {}
    for ends, devices in devices_of.items():
        values = _read_part(read, entry, shape, names, tuple(slice(*axis) for axis in ends), dtype)
        parts |= {device: jax.device_put(values, device, may_alias=False) for device in devices}
        del values
        jax.block_until_ready([parts[device] for device in devices])  # until then they hold the values, too
    return jax.make_array_from_single_device_arrays(shape, sharding, [parts[device] for device in indices])


def shard_array(place: Placement, axes: tuple[str, ...], array: jax.Array) -> jax.Array:
    """An array that every process has, laid out as `place` says of its logical `axes`."""
    values = np.asarray(array)
    return jax.make_array_from_callback(array.shape, place(axes, array.shape), lambda index: values[index])


def _read_part(
    read: Read, entry: TensorEntry, shape: tuple[int, ...], names: dict[str, str], index: Index, dtype: Any
) -> np.ndarray:
    part = np.empty([axis.stop - axis.start for axis in index], dtype)
    stacked, inner = index[: entry.stacked], index[entry.stacked :]
    for tensor, at in entry.tensors(shape):
        if all(axis.start <= number < axis.stop for axis, number in zip(stacked, at, strict=True)):
            place = tuple(number - axis.start for axis, number in zip(stacked, at, strict=True))
            part[place] = _read_values(read, entry, names[tensor], inner)
    return part


def _read_values(read: Read, entry: TensorEntry, tensor: str, inner: Index) -> np.ndarray:
    """A fused tensor is read whole: our numbers are scattered over it."""
    return read(tensor, inner) if entry.tensor_slice is None else entry.take(read(tensor, None))[inner]
