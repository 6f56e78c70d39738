"""From a flat dict of arrays to a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np

from trl_jax.core.tensors_file import Pieces, as_dtype
from trl_jax.core.whole_file import write_whole
from trl_jax.hub.config import classifier_config
from trl_jax.hub.files import shard_plan, write_checkpoint
from trl_jax.hub.loading import Source
from trl_jax.hub.wires import Wire


def save(
    folder: Path,
    params: dict[str, jax.Array],
    source: Source,
    *,
    pad_token_id: int | None,
    eos_token_id: int | list[int] | None,
    writes: bool = True,
) -> None:
    """Write config.json and the weights as transformers' sequence classifier of this model_type has them.

    Names, shards and every config key are those of the source; each tensor has the dtype it was loaded in. Where not
    `writes`, parameters are only read.
    """
    places = places_of(params, source)
    known = {tensor for tensors in source.shards.values() for tensor in tensors}
    plan = shard_plan(source.shards, {*places, *source.carried}, sorted(set(places) - known))

    def pieces(tensor: str) -> Pieces:
        if tensor in source.carried:
            return source.carried[tensor]
        dtype, (wire, _) = as_dtype(source.dtypes.get(tensor, source.dtype)), places[tensor][0]
        shape = wire.shape_on_disk(params[wire.path].shape)
        return Pieces(shape, dtype, lambda: [read_tensor(params, places[tensor]).astype(dtype, copy=False)])

    if not writes:
        write_checkpoint(folder, plan, pieces, writes=False)
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, plan, pieces)
    config = classifier_config(
        source.raw,
        architecture=source.family.architecture,
        dtype=source.dtype,
        pad_token_id=pad_token_id,
        eos_token_id=eos_token_id,
    )
    write_whole(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


Place = tuple[Wire, tuple[int, ...]]


def places_of(params: dict[str, jax.Array], source: Source) -> dict[str, list[Place]]:
    """Tensor on disk -> the wires that have a part in it, each with its index in our array."""
    places: dict[str, list[Place]] = {}
    for wire in source.wires:
        for tensor, index in wire.tensors(params[wire.path].shape):
            places.setdefault(tensor, []).append((wire, index))
    return places


def read_tensor(params: dict[str, jax.Array], places: list[Place]) -> np.ndarray:
    """One tensor on disk, joined from its parts; float32."""
    wire, index = places[0]
    if wire.part is None:
        return np.asarray(params[wire.path][index])
    whole = np.empty(wire.shape_on_disk(params[wire.path].shape), np.float32)
    for wire, index in places:
        wire.put(np.asarray(params[wire.path][index]), whole)
    return whole
