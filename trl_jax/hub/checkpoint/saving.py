"""From a flat dict of arrays to a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trl_jax.core.files.tensors_file import Pieces, as_dtype
from trl_jax.core.files.whole_file import write_whole
from trl_jax.hub.checkpoint.head_tensors import saved_config
from trl_jax.hub.checkpoint.host import taken
from trl_jax.hub.checkpoint.loading import Source
from trl_jax.hub.checkpoint.tensor_map import TensorEntry
from trl_jax.hub.formats.safetensors import shard_plan, write_checkpoint


def save(
    folder: Path,
    params: dict[str, jax.Array],
    source: Source,
    *,
    changed: Mapping[str, Any],
    writes: bool = True,
) -> None:
    """Write config.json and the weights as transformers has them for this model_type and head.

    Names, shards and every config key but those `changed` are those of the source; each tensor has the dtype it was
    loaded in. Where not `writes`, parameters are only read.
    """
    entries = entries_of(params, source)
    known = {tensor for tensors in source.shards.values() for tensor in tensors}
    shards = shard_plan(source.shards, {*entries, *source.carried}, sorted(set(entries) - known))

    def pieces(tensor: str) -> Pieces:
        if tensor in source.carried:
            return source.carried[tensor]
        dtype, (entry, _) = as_dtype(source.dtypes.get(tensor, source.dtype)), entries[tensor][0]
        shape = entry.shape_on_disk(params[entry.path].shape)
        return Pieces(shape, dtype, lambda: [read_tensor(params, entries[tensor]).astype(dtype, copy=False)])

    if not writes:
        write_checkpoint(folder, shards, pieces, writes=False)
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, shards, pieces)
    config = saved_config(source.config, dtype=source.dtype, changed=changed)
    write_whole(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


IndexedEntry = tuple[TensorEntry, tuple[int, ...]]


def entries_of(params: dict[str, jax.Array], source: Source) -> dict[str, list[IndexedEntry]]:
    """Tensor on disk -> the entries that have a slice in it, each with its index in our array."""
    entries: dict[str, list[IndexedEntry]] = {}
    for entry in source.tensor_map:
        for tensor, index in entry.tensors(params[entry.path].shape):
            entries.setdefault(tensor, []).append((entry, index))
    return entries


def read_tensor(params: dict[str, jax.Array], entries: list[IndexedEntry]) -> np.ndarray:
    """One tensor on disk, joined from the arrays of its entries; float32."""
    entry, index = entries[0]
    if entry.tensor_slice is None:
        return taken(params[entry.path], index)
    whole = np.empty(entry.shape_on_disk(params[entry.path].shape), np.float32)
    for entry, index in entries:
        entry.put(taken(params[entry.path], index), whole)
    return whole
