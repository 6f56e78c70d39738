"""Checkpoints that are pytorch_model.bin: torch reads their tensors, no code in them is run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from trl_jax.core import memory_errors
from trl_jax.hub.formats.safetensors import DTYPES, INDEX, SINGLE, indexed_shards
from trl_jax.hub.torch import bridge
from trl_jax.hub.torch.bridge import PICKLED

PICKLED_INDEX = "pytorch_model.bin.index.json"


def only_pickled(folder: Path) -> bool:
    """Whether a folder has its weights as pytorch_model.bin alone, and torch is here to read them."""
    safe = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
    return not safe and bridge.available() and any((folder / name).is_file() for name in (PICKLED, PICKLED_INDEX))


class PickledFiles:
    """The tensors of pytorch_model.bin, single or sharded, with the methods of `CheckpointFiles`."""

    def __init__(self, folder: Path):
        self._tensors: dict[str, Any] = {}
        self.shards: dict[str, list[str]] = {}
        names = [PICKLED] if (folder / PICKLED).is_file() else indexed_shards(folder, PICKLED_INDEX)
        for name in names:
            with memory_errors.naming(folder / name):
                tensors = bridge.unpickled(folder / name)
            if twice := tensors.keys() & self._tensors.keys():
                raise ValueError(f"{folder / name} holds the tensor {min(twice)}, which an earlier shard holds too.")
            self.shards[name] = list(tensors)
            self._tensors |= tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.dtypes = {name: bridge.dtype_name(tensor.dtype) for name, tensor in self._tensors.items()}
        self._folder = folder

    def check_dtypes(self, tensors: Iterable[str]) -> None:
        """Refuse the first of these tensors that is in a dtype which cannot be read."""
        for tensor in tensors:
            if self.dtypes[tensor] not in DTYPES.values():
                raise ValueError(
                    f"{self._folder}: tensor {tensor} has dtype {self.dtypes[tensor]}; trl_jax reads "
                    f"{', '.join(DTYPES.values())}. Save the checkpoint again in one of these."
                )

    def read(self, tensor: str) -> np.ndarray:
        """The values of one tensor, in the dtype of the file."""
        return bridge.as_array(self._tensors[tensor])
