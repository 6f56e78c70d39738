"""The arrays of an adapter and the tensors of its file, both ways."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trl_jax.core.printable import brief, listed
from trl_jax.hub.checkpoint.saving import read_tensor
from trl_jax.hub.formats.safetensors import open_tensors, shape_of
from trl_jax.hub.heads import Head
from trl_jax.hub.peft.adapters import AdapterPlan
from trl_jax.hub.peft.lora_config import PICKLED, WEIGHTS, no_adapter
from trl_jax.mesh.arrays import owned
from trl_jax.models.adapted import leaf

# Where a table was resized, PEFT saves what is below its own modules, too.
_OF_THE_BASE = re.compile(r"\.(base_layer|original_module|modules_to_save)\.")
_SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")
logger = logging.getLogger(__name__)


def tensors_of(plan: AdapterPlan, params: dict[str, Any], tables: dict[str, Any]) -> dict[str, np.ndarray]:
    """The content of adapter_model.safetensors, by name; float32. `tables` has the arrays of `plan.saved_tables`, by
    path."""
    tensors = {
        name: np.asarray(params[leaf(one.adapter.name, kind)][at], np.float32)
        for one in plan.modules
        for name, kind, at in one.tensors()
    }
    tensors |= {name: np.asarray(tables[path], np.float32) for name, path in plan.saved_tables.items()}
    return tensors | full_tensors(plan, params)


def full_tensors(plan: AdapterPlan, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of the model's own parameters that train."""
    tensors, full = {}, plan.full
    for name, entries in full.tensors.items():
        arrays = {entry.path: params[full.array_of(entry.path)] for entry, _ in entries}
        tensors[name] = read_tensor(arrays, [(entry, full.index_of(entry.path, at)) for entry, at in entries])
    return tensors


def arrays_of(plan: AdapterPlan, tensors: dict[str, np.ndarray], shapes: dict[str, Any]) -> dict[str, jax.Array]:
    """The inverse: arrays that train, of these shapes, from tensors by name."""
    arrays = {name: np.zeros(like.shape, np.float32) for name, like in shapes.items()}
    for one in plan.modules:
        for name, kind, at in one.tensors():
            arrays[leaf(one.adapter.name, kind)][at] = tensors[name]
    for name, entries in plan.full.tensors.items():
        for entry, at in entries:
            array, index = plan.full.array_of(entry.path), plan.full.index_of(entry.path, at)
            arrays[array][index] = entry.take(np.asarray(tensors[name], np.float32))
    return {name: owned(array) for name, array in arrays.items()}


def tokens_of(folder: Path, head: Head) -> int | None:
    """How many tokens the language model's head has that an adapter's file holds whole; None where it holds none."""
    path, names = folder / WEIGHTS, [f"base_model.model.{prefix}weight" for prefix in head.prefixes]
    if head.kind != "lm" or not path.is_file():
        return None
    shapes = (shape_of(path, name) for name in names)
    return next((shape[0] for shape in shapes if shape), None)


def wanted_shapes(plan: AdapterPlan, shapes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name on disk -> shape, of all that an adapter's file must hold; `shapes` are those of the arrays that train."""
    wanted = {
        name: np.empty(shapes[leaf(one.adapter.name, kind)].shape, np.bool_)[at].shape
        for one in plan.modules
        for name, kind, at in one.tensors()
    }
    for name, entries in plan.full.tensors.items():
        entry = entries[0][0]
        wanted[name] = entry.shape_on_disk(shapes[plan.full.array_of(entry.path)].shape)
    return wanted


def read_tensors(
    folder: Path, plan: AdapterPlan, shapes: dict[str, Any], defaults: dict[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """The tensors of an adapter's file that the plan asks for; from `defaults` those that it lacks.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it is of another model; by name and shape.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        raise no_adapter(str(folder), (folder / PICKLED).exists())
    tensors, wanted = open_tensors(path), wanted_shapes(plan, shapes)
    lacking = sorted(set(defaults or {}) - set(tensors))
    if lacking:
        logger.warning("%s has no %s: the base model's own is taken, and trains from there.", path, _some(lacking))
    tensors = (defaults or {}) | tensors
    _check_names(path, plan, set(tensors), set(wanted))
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != tuple(shape):
            raise ValueError(
                f"{path}: {name} is {brief(list(tensors[name].shape))}, this base model asks for {list(shape)}: the "
                "adapter is another model's. Pass the base model that it was trained on."
            )
    return {name: tensors[name] for name in wanted}


def _check_names(path: Path, plan: AdapterPlan, names: set[str], wanted: set[str]) -> None:
    missing = sorted(wanted - names)
    strange = sorted(name for name in names - wanted - set(plan.saved_tables) if not _OF_THE_BASE.search(name))
    if any(_SINGLE_EXPERT.search(name) for name in strange):
        raise ValueError(
            f"{path} has an adapter for each expert, as transformers 4 had them; today all lie in one parameter. PEFT "
            "converts it: PeftModel.from_pretrained(base, folder).save_pretrained(new_folder)."
        )
    if missing or strange:
        raise ValueError(
            f"{path} does not fit its config and this base model. Missing: {_some(missing)}. Unexpected: "
            f"{_some(strange)}. Pass the base model that it was trained on."
        )


def _some(names: list[str]) -> str:
    return listed(names, 4, "; ") or "none"
