"""Arrays of several devices from tensors on disk: each device's part is read by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from trl_jax.hub.checkpoint.tensor_map import TensorEntry

Index = tuple[slice, ...]
Read = Callable[[str, Index | None], np.ndarray]  # a tensor on disk, or a part of it
Place = Callable[[tuple[str, ...], tuple[int, ...]], Any]  # a parameter's logical axes and shape -> its sharding


def divided(
    read: Read,
    entry: TensorEntry,
    shape: tuple[int, ...],
    names: dict[str, str],
    sharding: Any,
    dtype: Any = np.float32,
) -> jax.Array:
    """One of our arrays where `sharding` wants it; only this process's devices get theirs.

    The host holds what one device has of this one array, besides the array itself; twice for a moment.
    """
    places = sharding.addressable_devices_indices_map(shape)
    alike: dict[tuple, list[Any]] = {}
    for device, index in places.items():
        whole = tuple(slice(*own.indices(size)[:2]) for own, size in zip(index, shape, strict=True))
        alike.setdefault(tuple((own.start, own.stop) for own in whole), []).append(device)
    parts = {}
    for ends, devices in alike.items():
        values = _part(read, entry, shape, names, tuple(slice(*own) for own in ends), dtype)
        parts |= {device: jax.device_put(values, device, may_alias=False) for device in devices}
        del values
        jax.block_until_ready([parts[device] for device in devices])  # until then they hold the values, too
    return jax.make_array_from_single_device_arrays(shape, sharding, [parts[device] for device in places])


def whole_at(place: Place, axes: tuple[str, ...], array: jax.Array) -> jax.Array:
    """An array that every process has, where `place` wants it."""
    values = np.asarray(array)
    return jax.make_array_from_callback(array.shape, place(axes, array.shape), lambda index: values[index])


def _part(read: Read, entry: TensorEntry, shape: tuple, names: dict[str, str], index: Index, dtype: Any) -> np.ndarray:
    part = np.empty([own.stop - own.start for own in index], dtype)
    counted, inner = index[: entry.stacked], index[entry.stacked :]
    for tensor, at in entry.tensors(shape):
        if all(own.start <= place < own.stop for own, place in zip(counted, at, strict=True)):
            place = tuple(place - own.start for own, place in zip(counted, at, strict=True))
            part[place] = _values(read, entry, names[tensor], inner)
    return part


def _values(read: Read, entry: TensorEntry, tensor: str, inner: Index) -> np.ndarray:
    """A fused tensor is read whole: what is ours lies in it strewn."""
    return read(tensor, inner) if entry.part is None else entry.take(read(tensor, None))[inner]
