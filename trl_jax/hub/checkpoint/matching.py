"""Tensors on disk and those that a model wants, by name and shape: both sides must match exactly."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any, NamedTuple

from trl_jax.core.printable import brief, listed
from trl_jax.hub.checkpoint import head_tensors
from trl_jax.hub.checkpoint.array_reader import Files
from trl_jax.hub.checkpoint.fused_experts import with_fused_experts
from trl_jax.hub.checkpoint.tensor_map import TensorEntry, make_tensor_map
from trl_jax.hub.config.native import NativeConfig, read_native_config
from trl_jax.hub.heads import ONE_LABEL

logger = logging.getLogger(__name__)
_OLD_NORMS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


class Matched(NamedTuple):
    """A checkpoint's table; full name of a tensor -> its name on disk; and whether the files have a head of its own for
    a model that config.json takes for tied."""

    tensor_map: list[TensorEntry]
    on_disk: dict[str, str]
    has_own_head: bool


def match(config: NativeConfig, files: Files, shapes: dict[str, Any]) -> Matched:
    """Match the files of a checkpoint with the shapes of a model's parameters, before anything is allocated.

    Raises:
        ValueError: a tensor that is missing, unexpected, of a wrong shape, or of a dtype that cannot be read.
    """
    tensor_map = with_fused_experts(make_tensor_map(shapes, config.names), shapes, files.shapes)
    tensor_map = _with_stored_names(tensor_map, config, files)
    wanted = {
        tensor: entry.shape_on_disk(shapes[entry.path].shape)
        for entry in tensor_map
        for tensor, _ in entry.tensors(shapes[entry.path].shape)
    }
    on_disk = _full_names(config, files, set(wanted))
    head_tensors.adopt(config, files, on_disk, wanted)
    files.check_dtypes(on_disk.values())
    embedding = next(entry.tensor for entry in tensor_map if entry.path.endswith(".embed.weight"))
    head_tensors.check_dropped(config, on_disk)
    _leave_layers_out(config, on_disk, set(wanted))
    _check(config, files, on_disk, wanted)
    return Matched(tensor_map, on_disk, head_tensors.has_own_head(config, files, on_disk, embedding))


def _with_stored_names(tensor_map: list[TensorEntry], config: NativeConfig, files: Files) -> list[TensorEntry]:
    """A checkpoint with the names of another time keeps them, as transformers lets it."""
    base = config.family.base_prefix
    for prefix in config.family.other_prefixes:
        if any(name.startswith(prefix) for name in files.shapes):
            tensor_map = [replace(entry, tensor=_with_prefix(entry.tensor, base, prefix)) for entry in tensor_map]
    first, *other = config.family.language_heads or ("",)
    if first not in files.shapes and set(other) & set(files.shapes):
        tensor_map = [replace(entry, tensor=_with_prefix(entry.tensor, first, *other)) for entry in tensor_map]
    if not any(name.endswith("LayerNorm.gamma") for name in files.shapes):
        return tensor_map
    ending = re.compile(f"(?:{'|'.join(map(re.escape, _OLD_NORMS))})$")
    return [
        replace(entry, tensor=ending.sub(lambda match: _OLD_NORMS[match[0]], entry.tensor)) for entry in tensor_map
    ]


def _with_prefix(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def _full_names(config: NativeConfig, files: Files, wanted: set[str]) -> dict[str, str]:
    """Full name -> name on disk, without what is ignored or carried. The checkpoint of a bare base lacks the prefix."""
    family = config.family
    bare = not any(name.startswith((family.base_prefix, *family.other_prefixes)) for name in files.shapes)
    dropped = family.ignored if family.carried is None else (*family.ignored, family.carried)
    names = {}
    for name in files.shapes:
        of_head = name.startswith(config.head.prefixes) or head_tensors.of_other_head(config, name)
        full = name if of_head or not bare else family.base_prefix + name
        if full in wanted or not any(re.search(pattern, name) for pattern in dropped):
            names[full] = name
        elif name.startswith(config.head.prefixes):
            logger.warning(
                "%s: %s is left out: a %s has none, here as in transformers.", config.path.parent, name,
                head_tensors.architecture(family, config.head.kind),
            )  # fmt: skip
    return names


def _leave_layers_out(config: NativeConfig, on_disk: dict[str, str], wanted: set[str]) -> None:
    """Take the last layers out of `on_disk` where from_pretrained was told to have fewer than config.json says."""
    count, folder = config.arch.num_layers, config.path.parent
    numbers = {name: re.search(r"\.(\d+)\.", name) for name in on_disk.keys() - wanted}
    beyond = [name for name, number in numbers.items() if number and int(number[1]) >= count]
    if not beyond or read_native_config(folder, config.head.kind).arch.num_layers <= count:
        return
    logger.warning("%s: of its layers the first %d are taken, as was asked for.", folder, count)
    for name in beyond:
        del on_disk[name]


def _check(
    config: NativeConfig, files: Files, on_disk: dict[str, str], wanted: dict[str, tuple[int, ...]]
) -> None:
    folder, family = config.path.parent, config.family
    missing = sorted(set(wanted) - set(on_disk) - {draw.tensor for draw in config.draws()})
    unexpected = sorted(name for name in set(on_disk) - set(wanted) if not head_tensors.of_other_head(config, name))
    if missing or unexpected:
        raise ValueError(
            f"{folder}: the weights do not fit config.json (model_type {family.model_type!r}). "
            f"Missing: {_some(missing)}. Unexpected: {_some(unexpected)}. Pass the config.json that belongs to them."
        )
    wrong = [
        f"{name} is {brief(list(files.shapes[on_disk[name]]))}, config.json asks for {list(shape)}"
        for name, shape in wanted.items()
        if name in on_disk and files.shapes[on_disk[name]] != tuple(shape)
    ]
    if wrong:
        raise ValueError(f"{folder}: wrong shapes: {_some(wrong)}. {ONE_LABEL}")


def _some(items: list[str]) -> str:
    return listed(items, separator="; ") or "none"
