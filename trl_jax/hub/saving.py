"""From a flat dict of arrays to a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from trl_jax.hub.config import classifier_config
from trl_jax.hub.files import shard_plan, write_checkpoint
from trl_jax.hub.loading import Source
from trl_jax.hub.wires import HEAD


def save(
    folder: Path,
    params: dict[str, jax.Array],
    source: Source,
    *,
    pad_token_id: int | None,
    eos_token_id: int | list[int] | None,
) -> None:
    """Write config.json and the weights as transformers' sequence classifier of this model_type has them.

    Names, shards and every config key are those of the source; each tensor has the dtype it was loaded in.
    """
    folder.mkdir(parents=True, exist_ok=True)
    places = _places(source)
    kept = set(places)
    known = {tensor for tensors in source.shards.values() for tensor in tensors}
    plan = shard_plan(source.shards, kept, sorted(kept - known))
    write_checkpoint(folder, plan, lambda tensor: _tensor(params, places[tensor], source.dtypes[tensor]))
    config = classifier_config(
        source.raw,
        architecture=source.family.architecture,
        dtype=source.dtypes[HEAD],
        pad_token_id=pad_token_id,
        eos_token_id=eos_token_id,
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _places(source: Source) -> dict[str, tuple[str, int | None]]:
    """Tensor on disk -> (our path, which layer of it)."""
    places = {}
    for wire in source.wires:
        for layer, tensor in enumerate(wire.tensors(source.arch.num_layers)):
            places[tensor] = (wire.path, layer if wire.stacked else None)
    return places


def _tensor(params: dict[str, jax.Array], place: tuple[str, int | None], dtype: str) -> np.ndarray:
    path, layer = place
    values = np.asarray(params[path] if layer is None else params[path][layer])
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype, copy=False)
