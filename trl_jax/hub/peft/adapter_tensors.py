"""The arrays of an adapter and the tensors of its file, both ways."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trl_jax.core.printable import brief, listed
from trl_jax.hub.checkpoint.saving import read_tensor
from trl_jax.hub.config.native import NativeConfig
from trl_jax.hub.formats.safetensors import open_tensors, read_one, shape_of, tensor_names
from trl_jax.hub.peft.adapters import PREFIX, WRAPPED, AdapterPlan, is_token_table
from trl_jax.hub.peft.heads import is_lm_head
from trl_jax.hub.peft.lora_config import PICKLED, WEIGHTS, no_adapter
from trl_jax.hub.peft.modules import modules_of
from trl_jax.mesh.arrays import owned
from trl_jax.models.adapted import leaf

# Where a table was resized, PEFT saves what is below its own modules, too.
_OF_THE_BASE = re.compile(r"\.(base_layer|original_module|modules_to_save)\.")
_SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")
logger = logging.getLogger(__name__)


def tensors_of(plan: AdapterPlan, params: dict[str, Any], tables: dict[str, Any]) -> dict[str, np.ndarray]:
    """The content of adapter_model.safetensors, by name; float32 but for `tables`, the arrays of `plan.saved_tables` by
    path."""
    tensors = {
        name: np.asarray(params[leaf(one.adapter.name, kind)][at], np.float32)
        for one in plan.modules
        for name, kind, at in one.tensors()
    }
    tensors |= {name: tables[path] for name, path in plan.saved_tables.items()}
    tensors |= full_tensors(plan, params)
    return tensors | {name: tensors[source] for name, source in plan.copies.items()}


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


def tokens_of(folder: Path, config: NativeConfig) -> int | None:
    """How many tokens an adapter's file has rows for, in a table of tokens or a language model's head that it holds
    whole; None where it holds neither."""
    path = folder / WEIGHTS
    if not path.is_file():
        return None
    tables = [module.name for module in modules_of(config.untied()) if is_lm_head(module) or is_token_table(module)]
    shapes = (shape_of(path, f"{PREFIX}{name}{inner}.weight") for name in tables for inner in WRAPPED)
    return next((shape[0] for shape in shapes if shape), None)


def saved_in(folder: Path, plan: AdapterPlan) -> AdapterPlan:
    """The plan, of whose saved tables and copies those stay that an adapter's file has."""
    path = folder / WEIGHTS
    there = set(tensor_names(path)) if path.is_file() else set()
    saved = {name: array for name, array in plan.saved_tables.items() if name in there}
    return replace(plan, saved_tables=saved, copies={n: source for n, source in plan.copies.items() if n in there})


def read_tables(folder: Path, plan: AdapterPlan, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The base's tables of tokens in an adapter's file, by path, in the dtype that they are saved in.

    Args:
        shapes: of the base's arrays, by path.

    Raises:
        ValueError: a table has another shape.
    """
    path = _weights_in(folder)
    there, found = set(tensor_names(path)), {}
    for name, array in plan.saved_tables.items():
        if array in found or name not in there:
            continue
        values = read_one(path, name)
        if values.shape != tuple(shapes[array]):
            raise ValueError(
                f"{path}: {name} is {brief(list(values.shape))}, this base model asks for {list(shapes[array])}. "
                "Resize its vocabulary as it was when the adapter was trained."
            )
        found[array] = values
    lacking = sorted(name for name, array in plan.saved_tables.items() if array not in found)
    if lacking:
        logger.warning("%s has no %s: the base model's own is taken, whose new rows may differ.", path, _some(lacking))
    return found


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
    path = _weights_in(folder)
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


def _weights_in(folder: Path) -> Path:
    """The file of an adapter's folder. Raises FileNotFoundError or ValueError where there is none."""
    if not (folder / WEIGHTS).is_file():
        raise no_adapter(str(folder), (folder / PICKLED).exists())
    return folder / WEIGHTS


def _check_names(path: Path, plan: AdapterPlan, names: set[str], wanted: set[str]) -> None:
    missing, known = sorted(wanted - names), {*plan.saved_tables, *plan.copies}
    strange = sorted(name for name in names - wanted - known if not _OF_THE_BASE.search(name))
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
