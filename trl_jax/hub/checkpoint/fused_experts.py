"""Experts that lie on disk as transformers' modules have them: all in one tensor of three axes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from trl_jax.hub.checkpoint.tensor_map import TensorEntry
from trl_jax.hub.checkpoint.tensor_slices import ExpertRows

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
# The matrix of one expert -> the tensor of all, and its place among the two that may lie in it.
_FUSED = {
    ".{}.gate_proj.weight": (_GATE_UP, 0),
    ".{}.up_proj.weight": (_GATE_UP, 1),
    ".{}.down_proj.weight": (_DOWN, None),
}


def with_fused_experts(
    tensor_map: list[TensorEntry], shapes: Mapping[str, Any], on_disk: Collection[str]
) -> list[TensorEntry]:
    """The table of a checkpoint with a tensor for each matrix of an expert, as it is where `on_disk` has one for all
    experts in their place; such a checkpoint is saved as it came, as by transformers."""
    if not any(name.endswith(f".experts.{_GATE_UP}") for name in on_disk):
        return tensor_map
    return [_fused(entry, shapes[entry.path].shape) for entry in tensor_map]


def _fused(entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    ending = next((end for end in _FUSED if entry.tensor.endswith(f".experts{end}")), None)
    if ending is None:
        return entry
    name, place = _FUSED[ending]
    rows = None if place is None else ExpertRows(place * shape[-2], shape[-2], 2 * shape[-2])
    return replace(entry, tensor=f"{entry.tensor.removesuffix(ending)}.{name}", tensor_slice=rows)
