"""From a checkpoint folder to a flat dict of float32 arrays."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.config import read_config
from trl_jax.hub.families import Family, read_arch
from trl_jax.hub.files import CheckpointFiles
from trl_jax.hub.torch_bridge import PickledFiles, only_pickled
from trl_jax.hub.wires import HEAD, Wire
from trl_jax.models.arch import Arch
from trl_jax.models.functional import abstract_scorer

logger = logging.getLogger(__name__)

LANGUAGE_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Source:
    """What a loaded checkpoint was, as far as saving it again needs to know.

    Tensors go by their full name, with the family's prefix, whether or not the file had it.
    """

    raw: dict[str, Any]
    family: Family
    arch: Arch
    shards: dict[str, list[str]]
    dtypes: dict[str, str]
    wires: list[Wire] = field(repr=False)


def load(folder: Path, *, dtype: str, seed: int) -> tuple[dict[str, jax.Array], Source]:
    """Read a checkpoint: a sequence classifier with one label, a causal LM (its head is dropped) or a bare base.

    Args:
        folder: holds config.json and safetensors, single or sharded; where torch is, pytorch_model.bin will do.
        dtype: "float32", "bfloat16" or "float16" rounds the weights to that dtype; "auto" keeps each tensor's own.
            Either way the arrays returned are float32; the dtype is what they are written in again.
        seed: a score head that the checkpoint lacks is drawn as `torch.manual_seed(seed)` would have it.

    Raises:
        FileNotFoundError, ValueError: the file, tensor or key at fault by name.
    """
    raw = read_config(folder)
    family, arch = read_arch(raw, folder / "config.json")
    files = (PickledFiles if only_pickled(folder) else CheckpointFiles)(folder)
    on_disk = _full_names(family, files)
    wires = family.table(arch)
    _, shapes = abstract_scorer(arch)
    _check_language_head(folder, raw, arch, files, on_disk, family)
    _check(folder, family, arch, wires, shapes, files, on_disk)
    params = {}
    for wire in wires:
        if wire.tensor == HEAD and HEAD not in on_disk:
            params[wire.path] = _new_head(arch, shapes[wire.path], seed, folder)
        else:
            tensors = [on_disk[name] for name in wire.tensors(arch.num_layers)]
            params[wire.path] = _assemble(files, tensors, shapes[wire.path], dtype, wire.stacked)
    return params, _source(raw, family, arch, wires, files, on_disk, dtype)


def _assemble(
    files: CheckpointFiles, tensors: list[str], shape: jax.ShapeDtypeStruct, dtype: str, stacked: bool
) -> jax.Array:
    """One of our arrays from its tensors, put in place one by one: besides the array only one tensor is held."""
    if not stacked:
        return jnp.array(_read(files, tensors[0], dtype), jnp.float32)  # a copy: memory of NumPy cannot be donated
    whole = jnp.zeros(shape.shape, jnp.float32)
    for layer, tensor in enumerate(tensors):
        whole = jax.block_until_ready(_placed(whole, _read(files, tensor, dtype), layer))
    return whole


def _read(files: CheckpointFiles, tensor: str, dtype: str) -> np.ndarray:
    values = files.read(tensor)
    if dtype in ("auto", files.dtypes[tensor]):
        return values
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@partial(jax.jit, donate_argnums=0)
def _placed(whole: jax.Array, values: jax.Array, layer: jax.Array) -> jax.Array:
    return whole.at[layer].set(values.astype(whole.dtype))


def _new_head(arch: Arch, shape: jax.ShapeDtypeStruct, seed: int, folder: Path) -> jax.Array:
    logger.info("%s has no %s: drawn from a normal distribution with seed %d.", folder, HEAD, seed)
    values = TorchGenerator(seed).normal(int(np.prod(shape.shape)), arch.initializer_range)
    return jnp.asarray(values.reshape(shape.shape))


def _full_names(family: Family, files: CheckpointFiles) -> dict[str, str]:
    """Full name -> name on disk, without what is ignored. The checkpoint of a bare base lacks the prefix."""
    bare = not any(name.startswith(family.base_prefix) for name in files.shapes)
    names = {}
    for name in files.shapes:
        if any(re.search(pattern, name) for pattern in family.ignored):
            continue
        plain = name in (HEAD, LANGUAGE_HEAD) or not bare
        names[name if plain else family.base_prefix + name] = name
    return names


def _check(folder, family, arch, wires, shapes, files, on_disk) -> None:
    """Both sides of the table match exactly, before anything is allocated."""
    wanted = {}
    for wire in wires:
        shape = shapes[wire.path].shape
        wanted |= dict.fromkeys(wire.tensors(arch.num_layers), shape[1:] if wire.stacked else shape)
    missing = sorted(set(wanted) - set(on_disk) - {HEAD})
    unexpected = sorted(set(on_disk) - set(wanted) - {LANGUAGE_HEAD})
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


def _check_language_head(folder, raw, arch, files, on_disk, family) -> None:
    """The head is dropped either way, but a checkpoint that contradicts its config may be a broken one."""
    tied, present = arch.tied_embeddings, LANGUAGE_HEAD in on_disk
    architecture = str((raw.get("architectures") or [""])[0])
    if not tied and not present and architecture.endswith("ForCausalLM"):
        raise ValueError(
            f"{folder}: config.json says architectures=[{architecture!r}] and tie_word_embeddings=false, but the "
            f"weights have no {LANGUAGE_HEAD}. Set tie_word_embeddings to true if the head is the embedding."
        )
    embedding = on_disk.get(f"{family.base_prefix}embed_tokens.weight")
    if tied and present and embedding is not None:
        if not np.array_equal(files.read(on_disk[LANGUAGE_HEAD]), files.read(embedding)):
            raise ValueError(
                f"{folder}: config.json says tie_word_embeddings=true, but {LANGUAGE_HEAD} differs from {embedding}. "
                "Set it to false, or remove the tensor."
            )


def _some(items: list[str], most: int = 8) -> str:
    if not items:
        return "none"
    return "; ".join(items[:most]) + (f"; and {len(items) - most:,} more" if len(items) > most else "")


def _source(raw, family, arch, wires, files, on_disk, dtype) -> Source:
    full = {disk: name for name, disk in on_disk.items()}
    shards = {file: [full[name] for name in tensors if name in full] for file, tensors in files.shards.items()}
    own = {full[name]: files.dtypes[name] if dtype == "auto" else dtype for name in full}
    stored = raw.get("dtype") or raw.get("torch_dtype") or next(iter(own.values()))
    head = stored if dtype == "auto" else dtype
    return Source(raw, family, arch, shards, {HEAD: head, **own}, wires)
