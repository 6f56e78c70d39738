"""From a checkpoint folder to a flat dict of float32 arrays."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from trl_jax.core.tensors_file import Pieces, as_dtype
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.checkpoint import matching
from trl_jax.hub.checkpoint.sharded_reading import Index, Place, divided
from trl_jax.hub.checkpoint.tensor_map import TensorEntry, make_tensor_map
from trl_jax.hub.config.reader import read_config
from trl_jax.hub.families import Draw, Family, read_arch
from trl_jax.hub.formats.gguf import LINK, GgufFiles
from trl_jax.hub.formats.pickles import PickledFiles, only_pickled
from trl_jax.hub.formats.safetensors import CheckpointFiles
from trl_jax.hub.peft.quantization import quantized
from trl_jax.models.functional import abstract, logical_axes
from trl_jax.nn.quantized import HALVES, Format

logger = logging.getLogger(__name__)

Shapes = dict[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class Source:
    """What a loaded checkpoint was, as far as saving it again needs to know.

    Tensors go by their full name, with the family's prefix, whether or not the file had it. `dtype` is that of tensors
    which the file had not, and what config.json will say. `carried` reads each tensor that is saved as it came; `drawn`
    are those that the checkpoint lacks.
    """

    raw: dict[str, Any]
    family: Family
    arch: Any
    shards: dict[str, list[str]]
    dtypes: dict[str, str]
    dtype: str
    tensor_map: list[TensorEntry] = field(repr=False)
    carried: dict[str, Pieces] = field(repr=False)
    drawn: tuple[str, ...] = ()


def load(
    folder: Path,
    *,
    dtype: str,
    seed: int | TorchGenerator,
    as_stored: bool = False,
    formats: dict[str, Format] | None = None,
    bits: Collection[str] = (),
    place: Place | None = None,
) -> tuple[dict[str, jax.Array], Source]:
    """Read a checkpoint: a sequence classifier with one label, a causal LM (its head is dropped) or a bare base.

    Args:
        folder: holds config.json and safetensors, single or sharded; where torch is, pytorch_model.bin will do.
        dtype: "float32", "bfloat16" or "float16" rounds the weights to that dtype; "auto" keeps each tensor's own.
            Either way the arrays returned are float32; the dtype is what they are written in again.
        seed: a score head that the checkpoint lacks is drawn as `torch.manual_seed(seed)` would have it; a generator
            goes on from where it is.
        as_stored: the arrays have the dtype in question instead, as those may that do not train.
        formats: paths of weights that are quantised as they are read: `<path>.codes` and so on take their place.
        bits: paths of weights that, where they have sixteen bits and stay as stored, become `<path>.codes`, those bits.
        place: from a parameter's logical axes and shape to its sharding, on several devices.

    Raises:
        FileNotFoundError, ValueError: the file, tensor or key at fault by name.
    """
    raw = read_config(folder)
    family, arch = read_arch(raw, folder / "config.json")
    files = _files(folder)
    _, shapes = abstract(lambda: family.scorer(arch))
    tensor_map, drawn = (
        matching.as_stored(make_tensor_map(shapes, family.names(arch)), family, files),
        family.drawn(arch),
    )
    wanted = {tensor for entry in tensor_map for tensor, _ in entry.tensors(shapes[entry.path].shape)}
    on_disk = matching.full_names(family, files, wanted)
    carried = {name for name in files.shapes if family.carried is not None and re.search(family.carried, name)}
    matching.adopt_head(folder, family, on_disk, wanted, shapes, files)
    files.check_dtypes(on_disk.values())
    matching.check_language_head(folder, raw, arch, files, on_disk, family, tensor_map)
    matching.check(folder, family, tensor_map, shapes, files, on_disk, {draw.tensor for draw in drawn})
    missing = [draw for draw in drawn if draw.tensor not in on_disk]
    new = _draw(folder, missing, tensor_map, shapes, seed)
    axes = {} if place is None else logical_axes(lambda: family.scorer(arch))

    def array(entry: TensorEntry) -> jax.Array:
        if entry.path in new:
            return new[entry.path]
        shape, held = shapes[entry.path], _held_dtype(files, entry, on_disk, dtype) if as_stored else jnp.float32
        if place is None:
            return _assemble(files, entry, shape, on_disk, dtype, held)
        read, where = partial(_read_part, files, dtype), place(axes.get(entry.path, ()), shape.shape)
        return divided(read, entry, shape.shape, on_disk, where, held)

    params = {}
    for entry in tensor_map:
        if entry.path in (formats or {}):
            params |= _quantised(files, entry, shapes[entry.path], on_disk, dtype, formats[entry.path])
        elif entry.path in bits and entry.path not in new and _held_dtype(files, entry, on_disk, dtype).name in HALVES:
            kind = _held_dtype(files, entry, on_disk, dtype)
            params[f"{entry.path}.codes"] = _assemble(files, entry, shapes[entry.path], on_disk, dtype, kind, bits=True)
        else:
            params[entry.path] = array(entry)
    source = _source(raw, family, arch, tensor_map, files, on_disk, dtype, carried)
    return params, replace(source, drawn=tuple(dict.fromkeys(draw.tensor for draw in missing)))


def outline(
    folder: Path,
    *,
    dtype: str,
    as_stored: bool = False,
    formats: dict[str, Format] | None = None,
    bits: Collection[str] = (),
) -> tuple[Shapes, Source]:
    """What `load` would give, from a config.json alone: shapes in the place of arrays. What a checkpoint lacks is what
    one of that architecture does.

    Raises:
        ValueError: arrays are to stay as stored, and neither `dtype` nor config.json says how that is.
    """
    raw = read_config(folder)
    family, arch = read_arch(raw, folder / "config.json")
    _, shapes = abstract(lambda: family.scorer(arch))
    tensor_map = make_tensor_map(shapes, family.names(arch))
    whole = family.architecture in (raw.get("architectures") or [])
    drawn = () if whole else tuple(dict.fromkeys(draw.tensor for draw in family.drawn(arch)))
    if as_stored and dtype == "auto":
        dtype = _said_dtype(folder, raw)
    source = Source(raw, family, arch, {}, {}, dtype, tensor_map, {}, drawn)
    if not as_stored:
        return shapes, source
    held, found = jnp.dtype(dtype), {}
    for entry in tensor_map:
        shape, form = shapes[entry.path].shape, (formats or {}).get(entry.path)
        if form is None and entry.path in bits and held.name in HALVES and entry.tensor not in drawn:
            form = Format(held.name, shape[-2:])
        if form is None:
            kind = jnp.float32 if entry.tensor in drawn else held
            found[entry.path] = jax.ShapeDtypeStruct(shape, kind)
            continue
        for name, (part, kind) in form.leaves().items():
            found[f"{entry.path}.{name}"] = jax.ShapeDtypeStruct((*shape[:-2], *part), kind)
    return found, source


def _said_dtype(folder: Path, raw: dict[str, Any]) -> str:
    said = raw.get("dtype") or raw.get("torch_dtype")
    if said is None:
        raise ValueError(
            f"{folder / 'config.json'} does not say in which dtype the weights are stored, and dtype is 'auto'. Say "
            "it: --dtype bfloat16."
        )
    return str(said)


def _files(folder: Path) -> CheckpointFiles | GgufFiles | PickledFiles:
    if (folder / LINK).exists():
        return GgufFiles(folder / LINK)
    return (PickledFiles if only_pickled(folder) else CheckpointFiles)(folder)


def _held_dtype(files: CheckpointFiles, entry: TensorEntry, on_disk: dict[str, str], dtype: str) -> Any:
    """The dtype of an array that stays as it is stored: its first tensor's own, or the one all are rounded to."""
    first = on_disk[entry.tensor.format(*[entry.first] * entry.stacked)]
    return jnp.dtype(files.dtypes[first] if dtype == "auto" else dtype)


def _assemble(
    files: CheckpointFiles | GgufFiles,
    entry: TensorEntry,
    shape: jax.ShapeDtypeStruct,
    on_disk: dict[str, str],
    dtype: str,
    held: Any,
    *,
    bits: bool = False,
) -> jax.Array:
    """One of our arrays, of dtype `held`, from its tensors, put in place one by one: besides it one tensor is there.
    With `bits` the array has the bits of those numbers."""

    def read(tensor: str) -> np.ndarray:
        values = entry.take(_read(files, on_disk[tensor], dtype))
        return values.astype(held, copy=False).view(np.uint16) if bits else values

    places = entry.tensors(shape.shape)
    held_as = jnp.uint16 if bits else held
    if not entry.stacked:  # a copy: memory of NumPy cannot be donated
        return jnp.array(read(places[0][0]), held_as)
    whole = jnp.zeros(shape.shape, held_as)
    for tensor, index in places:
        values = read(tensor)
        whole = jax.block_until_ready(_placed(whole, values, np.asarray(index)))
    return whole


def _quantised(
    files, entry: TensorEntry, shape, on_disk: dict[str, str], dtype: str, form: Format
) -> dict[str, jax.Array]:
    """The same, each tensor quantised when it comes: the whole of the weights is never there as floats."""
    lead, leaves = shape.shape[: entry.stacked], form.leaves()
    held = {name: np.empty((*lead, *part), kind) for name, (part, kind) in leaves.items()}
    for tensor, index in entry.tensors(shape.shape):
        for name, values in quantized(entry.take(_read(files, on_disk[tensor], dtype)), form).items():
            held[name][index] = values
    return {f"{entry.path}.{name}": jnp.array(values) for name, values in held.items()}


def _read(files: CheckpointFiles, tensor: str, dtype: str) -> np.ndarray:
    values = files.read(tensor)
    if isinstance(files, CheckpointFiles):
        files.let_go(tensor, values.nbytes)
    return _rounded(files, tensor, dtype, values)


def _read_part(files: CheckpointFiles, dtype: str, tensor: str, index: Index | None) -> np.ndarray:
    """Only these bytes of a safetensors file; other formats give a tensor whole."""
    if index is None or not isinstance(files, CheckpointFiles):
        values = files.read(tensor)
        values = values if index is None else values[index]
    else:
        values = files.read_part(tensor, index)
        files.let_go(tensor, values.nbytes)
    return _rounded(files, tensor, dtype, values)


def _rounded(files: CheckpointFiles, tensor: str, dtype: str, values: np.ndarray) -> np.ndarray:
    if dtype in ("auto", files.dtypes[tensor]):
        return values
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@partial(jax.jit, donate_argnums=0)
def _placed(whole: jax.Array, values: jax.Array, index: jax.Array) -> jax.Array:
    return whole.at[tuple(index)].set(values.astype(whole.dtype))


def _draw(
    folder: Path, missing: list[Draw], tensor_map: list[TensorEntry], shapes: Shapes, seed: Any
) -> dict[str, jax.Array]:
    """What the checkpoint lacks, drawn one after the other from one generator."""
    generator = seed if isinstance(seed, TorchGenerator) else TorchGenerator(seed)
    path_of, new = {entry.tensor: entry.path for entry in tensor_map}, {}
    for draw in missing:
        shape = shapes[path_of[draw.tensor]].shape
        new[path_of[draw.tensor]] = jnp.asarray(draw.values(generator, shape), jnp.float32)
    if missing:
        names = ", ".join(dict.fromkeys(draw.tensor for draw in missing))
        logger.info("%s has no %s: drawn from a normal distribution with seed %d.", folder, names, generator.seed)
    return new


def _source(raw, family, arch, tensor_map, files, on_disk, dtype, carried) -> Source:
    full = {disk: name for name, disk in on_disk.items()} | {name: name for name in carried}
    shards = {file: [full[name] for name in tensors if name in full] for file, tensors in files.shards.items()}
    own = {full[name]: files.dtypes[name] if dtype == "auto" else dtype for name in full if name not in carried}
    stored = raw.get("dtype") or raw.get("torch_dtype") or next(iter(own.values()))
    read = {name: _carried(files, name) for name in carried}
    return Source(raw, family, arch, shards, own, stored if dtype == "auto" else dtype, tensor_map, read)


def _carried(files: CheckpointFiles, name: str) -> Pieces:
    return Pieces(files.shapes[name], as_dtype(files.dtypes[name]), lambda: [files.read(name)])
