"""Our arrays from the tensors of a checkpoint: rounded, quantised, as bits, or spread over devices."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.core.files.tensors_file import as_dtype
from trl_jax.hub.checkpoint.host import SMALL
from trl_jax.hub.checkpoint.sharded_reading import Index, read_sharded
from trl_jax.hub.checkpoint.tensor_map import TensorEntry
from trl_jax.hub.formats.gguf import LINK, GgufFiles
from trl_jax.hub.formats.mxfp4 import BLOCKS, Mxfp4Files
from trl_jax.hub.formats.pickles import PickledFiles, only_pickled
from trl_jax.hub.formats.safetensors import CheckpointFiles
from trl_jax.hub.peft.quantization import quantized
from trl_jax.mesh.arrays import owned
from trl_jax.nn.quantized import HALVES, Format

Files = CheckpointFiles | GgufFiles | PickledFiles


def open_files(folder: Path) -> Files:
    """The weights of a folder, in the format they have."""
    if (folder / LINK).exists():
        return GgufFiles(folder / LINK)
    if only_pickled(folder):
        return PickledFiles(folder)
    files = CheckpointFiles(folder)
    return Mxfp4Files(folder) if any(name.endswith(BLOCKS) for name in files.shapes) else files


@dataclass(frozen=True)
class ArrayReader:
    """Reads our arrays one by one.

    Attributes:
        on_disk: full name of a tensor -> its name in `files`.
        dtype: the dtype that values are rounded to; "auto" keeps each tensor's own.
        in_float32: matches the names of tensors that are float32 where others have sixteen bits.
    """

    files: Files
    on_disk: dict[str, str]
    dtype: str
    in_float32: str | None = None

    def dtype_of(self, name: str) -> str:
        """The dtype that the tensor of this name in `files` is read in."""
        dtype = self.files.dtypes[name] if self.dtype == "auto" else self.dtype
        return "float32" if dtype in HALVES and self.in_float32 and re.search(self.in_float32, name) else dtype

    def stored_dtype(self, entry: TensorEntry) -> Any:
        """The dtype of an array that stays as it is stored: its first tensor's, or the one all are rounded to."""
        return jnp.dtype(self.dtype_of(self.on_disk[entry.tensor.format(*[entry.first] * entry.stacked)]))

    def array(self, entry: TensorEntry, shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> jax.Array:
        """One of our arrays, on one device or laid out as `sharding` says."""
        if sharding is None:
            return self._assemble(entry, shape, dtype, lambda values: values.astype(dtype, copy=False))
        return read_sharded(self._read_part, entry, shape, self.on_disk, sharding, dtype)

    def bits(self, entry: TensorEntry, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """The bits of an array of 16-bit floats, uint16."""
        return self._assemble(entry, shape, jnp.uint16, lambda x: x.astype(dtype, copy=False).view(np.uint16))

    def quantized(self, entry: TensorEntry, shape: tuple[int, ...], form: Format) -> dict[str, jax.Array]:
        """The arrays of a quantised weight, by path; each tensor is quantised when it is read, so that the whole of the
        weights is never there as floats."""
        leading, leaves = shape[: entry.stacked], form.leaves()
        arrays = {name: np.empty((*leading, *inner), kind) for name, (inner, kind) in leaves.items()}
        for tensor, index in entry.tensors(shape):
            for name, values in quantized(entry.take(self._read(self.on_disk[tensor])), form).items():
                arrays[name][index] = values
        return {f"{entry.path}.{name}": owned(values) for name, values in arrays.items()}

    def _assemble(self, entry: TensorEntry, shape: tuple[int, ...], dtype: Any, convert: Any) -> jax.Array:
        """Put the tensors in place one by one: besides the array, one tensor is in memory, or a small array twice."""

        def read(tensor: str) -> np.ndarray:
            return convert(entry.take(self._read(self.on_disk[tensor])))

        tensors = entry.tensors(shape)
        if not entry.stacked:  # a copy: memory of NumPy cannot be donated
            return owned(read(tensors[0][0]).astype(dtype, copy=False))
        if math.prod(shape) * np.dtype(dtype).itemsize <= SMALL:  # nothing is compiled for its shape
            host = np.empty(shape, dtype)
            for tensor, index in tensors:
                host[index] = read(tensor)
            return owned(host)
        array = jnp.zeros(shape, dtype)
        for tensor, index in tensors:
            values = read(tensor)
            array = jax.block_until_ready(_set_at(array, values, np.asarray(index)))
        return array

    def _read(self, tensor: str) -> np.ndarray:
        values = self.files.read(tensor)
        if isinstance(self.files, CheckpointFiles):
            self.files.release(tensor, values.nbytes)
        return self._rounded(tensor, values)

    def _read_part(self, tensor: str, index: Index | None) -> np.ndarray:
        """Only these bytes of a safetensors file; other formats give a tensor whole."""
        if index is None or not isinstance(self.files, CheckpointFiles):
            values = self.files.read(tensor)
            values = values if index is None else values[index]
        else:
            values = self.files.read_part(tensor, index)
            self.files.release(tensor, values.nbytes)
        return self._rounded(tensor, values)

    def _rounded(self, tensor: str, values: np.ndarray) -> np.ndarray:
        dtype = self.dtype_of(tensor)
        return values if dtype == self.files.dtypes[tensor] else values.astype(as_dtype(dtype))


@partial(jax.jit, donate_argnums=0)
def _set_at(array: jax.Array, values: jax.Array, index: jax.Array) -> jax.Array:
    return array.at[tuple(index)].set(values.astype(array.dtype))
