"""From a checkpoint folder to a flat dict of float32 arrays."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from trl_jax.core import memory_errors
from trl_jax.core.files.tensors_file import Pieces, as_dtype
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.checkpoint import head_tensors, matching
from trl_jax.hub.checkpoint.array_reader import ArrayReader, Files, open_files
from trl_jax.hub.checkpoint.sharded_reading import Placement
from trl_jax.hub.checkpoint.tensor_map import TensorEntry, make_tensor_map
from trl_jax.hub.config.native import NativeConfig
from trl_jax.hub.heads import Draw
from trl_jax.models.functional import logical_axes
from trl_jax.nn.quantized import HALVES, Format

logger = logging.getLogger(__name__)

Shapes = dict[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class Source:
    """The checkpoint that a model was loaded from, as far as saving it again needs to know.

    Tensors go by their full name, with the family's prefix, whether or not the file had it.

    Attributes:
        shards: file name -> its tensors.
        dtypes: tensor -> the dtype it is saved in.
        dtype: that of tensors which the files had not, and the one that config.json will name.
        carried: reads each tensor that is saved as it came.
        drawn: the tensors that the checkpoint lacks.
        resized: whether the tables of tokens have had another number of rows since it was loaded.
    """

    config: NativeConfig
    shards: dict[str, list[str]]
    dtypes: dict[str, str]
    dtype: str
    tensor_map: list[TensorEntry] = field(repr=False)
    carried: dict[str, Pieces] = field(repr=False)
    drawn: tuple[str, ...] = ()
    resized: bool = False


def load(
    config: NativeConfig,
    *,
    dtype: str,
    seed: int | TorchGenerator,
    as_stored: bool = False,
    formats: dict[str, Format] | None = None,
    bits: Collection[str] = (),
    place: Placement | None = None,
) -> tuple[dict[str, jax.Array], Source]:
    """Read the weights beside a config.json: with the head, with another one, which is dropped, or of a bare base.

    Args:
        config: its folder holds safetensors, single or sharded; where torch is, pytorch_model.bin will do.
        dtype: "float32", "bfloat16" or "float16" rounds the weights to that dtype; "auto" keeps each tensor's own.
            Either way the arrays returned are float32; the dtype is what they are written in again.
        seed: a head that the checkpoint lacks is drawn as `torch.manual_seed(seed)` would have it; a generator goes on
            from where it is.
        as_stored: the arrays have the dtype in question instead, as those may that do not train.
        formats: paths of weights that are quantised as they are read: `<path>.codes` and so on take their place.
        bits: paths of weights that, where they have sixteen bits and stay as stored, become `<path>.codes`, those bits.
        place: from a parameter's logical axes and shape to its sharding, on several devices.

    Raises:
        FileNotFoundError, ValueError: the file, tensor or key at fault by name.
        MemoryError: an array does not fit, on this machine or its device.
    """
    files = open_files(config.path.parent)
    _, shapes = config.abstract
    table = matching.match(config, files, shapes)
    if table.has_own_head:
        config = config.untied()
        _, shapes = config.abstract
        table = matching.match(config, files, shapes)
    wanted = {entry.tensor for entry in table.tensor_map}.difference(table.on_disk)
    missing = [draw for draw in config.draws() if draw.tensor in wanted]
    new = _draw(config, missing, table.tensor_map, shapes, seed)
    reader, params = ArrayReader(files, table.on_disk, dtype, config.family.in_float32), {}
    axes = {} if place is None else logical_axes(config.model)
    with memory_errors.naming(config.path.parent):
        for entry in table.tensor_map:
            path, shape = entry.path, shapes[entry.path].shape
            if path in (formats or {}):
                params |= reader.quantized(entry, shape, formats[path])
            elif path in new:
                params[path] = new[path]
            elif path in bits and reader.stored_dtype(entry).name in HALVES:
                params[f"{path}.codes"] = reader.bits(entry, shape, reader.stored_dtype(entry))
            else:
                stored = reader.stored_dtype(entry) if as_stored else jnp.float32
                params[path] = reader.array(entry, shape, stored, place and place(axes[path], shape))
    return params, _source(config, reader, table, missing)


def outline(
    config: NativeConfig,
    *,
    dtype: str,
    as_stored: bool = False,
    formats: dict[str, Format] | None = None,
    bits: Collection[str] = (),
) -> tuple[Shapes, Source]:
    """The result of `load` from a config.json alone: shapes in the place of arrays. The checkpoint is taken to lack
    what one of that architecture does.

    Raises:
        ValueError: arrays are to stay as stored, and neither `dtype` nor config.json says how that is.
    """
    _, shapes = config.abstract
    tensor_map = make_tensor_map(shapes, config.names)
    has_head = head_tensors.architecture(config.family, config.head.kind) in (config.raw.get("architectures") or [])
    drawn = () if has_head else tuple(dict.fromkeys(draw.tensor for draw in config.draws()))
    if as_stored and dtype == "auto":
        dtype = _stated_dtype(config)
    source = Source(config, {}, {}, dtype, tensor_map, {}, drawn)
    if not as_stored:
        return shapes, source
    stored, outlined = jnp.dtype(dtype), {}
    for entry in tensor_map:
        shape, form = shapes[entry.path].shape, (formats or {}).get(entry.path)
        in_float32 = entry.tensor in drawn or re.search(config.family.in_float32 or r"(?!)", entry.tensor)
        if form is None and entry.path in bits and stored.name in HALVES and not in_float32:
            form = Format(stored.name, shape[-2:])
        if form is None:
            outlined[entry.path] = jax.ShapeDtypeStruct(shape, jnp.float32 if in_float32 else stored)
            continue
        for name, (inner, kind) in form.leaves().items():
            outlined[f"{entry.path}.{name}"] = jax.ShapeDtypeStruct((*shape[:-2], *inner), kind)
    return outlined, source


def _stated_dtype(config: NativeConfig) -> str:
    stated = config.raw.get("dtype") or config.raw.get("torch_dtype")
    if stated is None:
        raise ValueError(
            f"{config.path} does not say in which dtype the weights are stored, and dtype is 'auto'. Say "
            "it: --dtype bfloat16."
        )
    return str(stated)


def _draw(
    config: NativeConfig, missing: list[Draw], tensor_map: list[TensorEntry], shapes: Shapes, seed: Any
) -> dict[str, jax.Array]:
    """The arrays that the checkpoint lacks, drawn one after the other from one generator."""
    generator = seed if isinstance(seed, TorchGenerator) else TorchGenerator(seed)
    path_of, new = {entry.tensor: entry.path for entry in tensor_map}, {}
    for draw in missing:
        shape = shapes[path_of[draw.tensor]].shape
        new[path_of[draw.tensor]] = jnp.asarray(draw.values(generator, shape), jnp.float32)
    if missing:
        names, folder = ", ".join(_tensors(missing)), config.path.parent
        level = logging.INFO if config.head.kind == "score" else logging.WARNING
        text = "%s has no %s: drawn from a normal distribution with seed %d."
        logger.log(level, text, folder, names, generator.seed)
    return new


def _tensors(draws: Iterable[Draw]) -> tuple[str, ...]:
    """Each once: some are drawn twice."""
    return tuple(dict.fromkeys(draw.tensor for draw in draws))


def _source(config: NativeConfig, reader: ArrayReader, table: matching.Matched, missing: list[Draw]) -> Source:
    files, dtype, raw = reader.files, reader.dtype, config.raw
    carried = {name for name in files.shapes if config.family.carried and re.search(config.family.carried, name)}
    full = {disk: name for name, disk in reader.on_disk.items()} | {name: name for name in carried}
    shards = {file: [full[name] for name in tensors if name in full] for file, tensors in files.shards.items()}
    dtypes = {full[name]: reader.dtype_of(name) for name in full if name not in carried}
    stored = raw.get("dtype") or raw.get("torch_dtype") or next(iter(dtypes.values()))
    pieces = {name: Pieces(files.shapes[name], as_dtype(files.dtypes[name]), _reader(files, name)) for name in carried}
    return Source(
        config, shards, dtypes, stored if dtype == "auto" else dtype, table.tensor_map, pieces, _tensors(missing)
    )


def _reader(files: Files, name: str) -> Callable[[], list[Any]]:
    return lambda: [files.read(name)]
