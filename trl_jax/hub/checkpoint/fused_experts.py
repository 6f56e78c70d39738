"""Experts that lie on disk as transformers' modules have them: all in one tensor of three axes."""

from __future__ import annotations

from collections.abc import Mapping
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
    tensor_map: list[TensorEntry], shapes: Mapping[str, Any], on_disk: Mapping[str, tuple[int, ...]]
) -> list[TensorEntry]:
    """The table of a checkpoint with a tensor for each matrix of an expert, as it is where `on_disk` has one for all
    experts in their place, either way round; such a checkpoint is saved as it came, as by transformers."""
    if not any(name.endswith(f".experts.{_GATE_UP}") for name in on_disk):
        return tensor_map
    return [_fused(entry, shapes[entry.path].shape, on_disk) for entry in tensor_map]


def _fused(entry: TensorEntry, shape: tuple[int, ...], on_disk: Mapping[str, tuple[int, ...]]) -> TensorEntry:
    ending = next((end for end in _FUSED if entry.tensor.endswith(f".experts{end}")), None)
    if ending is None:
        return entry
    (name, place), (experts, size, inputs) = _FUSED[ending], shape[-3:]
    tensor, total = f"{entry.tensor.removesuffix(ending)}.{name}", size if place is None else 2 * size
    found = {tuple(form) for stored, form in on_disk.items() if stored.endswith(f".experts.{name}")}
    transposed = total != inputs and found == {(experts, inputs, total)}
    if place is None and not transposed:
        return replace(entry, tensor=tensor, tensor_slice=None)
    rows = ExpertRows((place or 0) * size, size, total, transposed=transposed)
    return replace(entry, tensor=tensor, tensor_slice=rows)
