"""Tensors on disk and those that a model wants, by name and shape: both sides must match exactly."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import numpy as np

from trl_jax.hub.checkpoint.tensor_map import TensorEntry
from trl_jax.hub.families import Family
from trl_jax.hub.formats.safetensors import CheckpointFiles

logger = logging.getLogger(__name__)


def as_stored(tensor_map: list[TensorEntry], family: Family, files: CheckpointFiles) -> list[TensorEntry]:
    """Where the checkpoint has the names of another time, it keeps them, as transformers lets it."""
    for prefix in family.other_prefixes:
        if any(name.startswith(prefix) for name in files.shapes):
            tensor_map = [
                replace(entry, tensor=_with_prefix(entry.tensor, family.base_prefix, prefix)) for entry in tensor_map
            ]
    if not any(name.endswith("LayerNorm.gamma") for name in files.shapes):
        return tensor_map
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    ending = re.compile(f"(?:{'|'.join(map(re.escape, old))})$")
    return [replace(entry, tensor=ending.sub(lambda found: old[found[0]], entry.tensor)) for entry in tensor_map]


def _with_prefix(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def full_names(family: Family, files: CheckpointFiles, wanted: set[str]) -> dict[str, str]:
    """Full name -> name on disk, without what is ignored or carried. The checkpoint of a bare base lacks the prefix."""
    bare = not any(name.startswith((family.base_prefix, *family.other_prefixes)) for name in files.shapes)
    left = family.ignored if family.carried is None else (*family.ignored, family.carried)
    names = {}
    for name in files.shapes:
        of_head = name == family.language_head or name.startswith(family.heads)
        full = name if of_head or not bare else family.base_prefix + name
        if full in wanted or not any(re.search(pattern, name) for pattern in left):
            names[full] = name
    return names


def adopt_head(folder, family, on_disk, wanted, shapes, files) -> None:
    """A head of another name: the one tensor that nothing else accounts for, and of the shape of the head."""
    unknown = sorted(set(on_disk) - wanted - {family.language_head})
    if "score.weight" not in wanted - set(on_disk) or len(unknown) != 1:
        return
    name = on_disk[unknown[0]]
    if files.shapes[name] == shapes["score.weight"].shape:
        logger.warning("%s: %s has the shape of the score head and is read, and saved, as score.weight.", folder, name)
        on_disk["score.weight"] = on_disk.pop(unknown[0])


def check(folder, family, tensor_map, shapes, files, on_disk, optional) -> None:
    """Both sides of the table match exactly, before anything is allocated."""
    wanted = {}
    for entry in tensor_map:
        shape = shapes[entry.path].shape
        wanted |= dict.fromkeys((tensor for tensor, _ in entry.tensors(shape)), entry.shape_on_disk(shape))
    missing = sorted(set(wanted) - set(on_disk) - optional)
    unexpected = sorted(set(on_disk) - set(wanted) - {family.language_head})
    if missing or unexpected:
        raise ValueError(
            f"{folder}: the weights do not fit config.json (model_type {family.model_type!r}). "
            f"Missing: {_some(missing)}. Unexpected: {_some(unexpected)}. Pass the config.json that belongs to them."
        )
    wrong = [
        f"{name} is {list(files.shapes[on_disk[name]])}, config.json asks for {list(shape)}"
        for name, shape in wanted.items()
        if name in on_disk and files.shapes[on_disk[name]] != tuple(shape)
    ]
    if wrong:
        raise ValueError(f"{folder}: wrong shapes: {_some(wrong)}. A reward model has one score a sequence (1 label).")


def check_language_head(folder, raw, arch, files, on_disk, family, tensor_map) -> None:
    """The head is dropped either way, but a checkpoint that contradicts its config may be a broken one."""
    if family.language_head is None:
        return
    tied, head = arch.tied_embeddings, family.language_head
    architecture = str((raw.get("architectures") or [""])[0])
    if not tied and head not in on_disk and architecture.endswith("ForCausalLM"):
        raise ValueError(
            f"{folder}: config.json says architectures=[{architecture!r}] and tie_word_embeddings=false, but the "
            f"weights have no {head}. Set tie_word_embeddings to true if the head is the embedding."
        )
    embedding = next(on_disk.get(entry.tensor) for entry in tensor_map if entry.path.endswith(".embed.weight"))
    if tied and head in on_disk and embedding is not None:
        if not np.array_equal(files.read(on_disk[head]), files.read(embedding)):
            raise ValueError(
                f"{folder}: config.json says tie_word_embeddings=true, but {head} differs from {embedding}. "
                "Set it to false, or remove the tensor."
            )


def _some(items: list[str], most: int = 8) -> str:
    if not items:
        return "none"
    return "; ".join(items[:most]) + (f"; and {len(items) - most:,} more" if len(items) > most else "")
