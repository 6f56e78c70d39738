"""Load a checkpoint folder into arrays and save arrays to a checkpoint folder.

A tensor map lists which tensor on disk, or which slice of it, holds each array. `match` checks it against the files
before anything is allocated. A `Source` is what `save` needs to write the same files again.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.core import files, text
from trl_jax.core.files import Pieces, as_dtype, write_whole
from trl_jax.core.text import brief, listed
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.config import NativeConfig, read_native_config
from trl_jax.hub.config_reader import config_class
from trl_jax.hub.families import Family
from trl_jax.hub.formats import (
    CheckpointFiles,
    PickledFiles,
    only_pickled,
    read_checkpoint,
    shard_plan,
    split_shards,
    write_checkpoint,
)
from trl_jax.hub.gguf import BLOCKS, LINK, GgufFiles, Mxfp4Files
from trl_jax.hub.heads import ONE_LABEL, Draw, HeadName
from trl_jax.hub.quantization import quantized
from trl_jax.hub.tensor_map import TensorEntry, make_tensor_map, with_fused_experts
from trl_jax.mesh.mesh import owned
from trl_jax.models.model import logical_axes
from trl_jax.nn.linear import HALVES, Format

logger = logging.getLogger(__name__)

# Saving


def save(
    folder: Path | None,
    params: dict[str, jax.Array],
    source: Source,
    *,
    changed: Mapping[str, Any],
    max_shard_size: int | str | None = None,
) -> None:
    """Write config.json and the weights in transformers' format for this model_type and head.

    Names, shards and config keys are those of the source, except for the config keys in `changed`. Each tensor is saved
    in the dtype it was loaded in.

    Args:
        folder: None only reads the parameters.
        max_shard_size: most bytes per file, as in transformers; None keeps the source's shards.
    """
    entries = entries_of(params, source.tensor_map)
    sharded = {tensor for tensors in source.shards.values() for tensor in tensors}
    shards = shard_plan(source.shards, {*entries, *source.carried}, sorted(set(entries) - sharded))

    def pieces(tensor: str) -> Pieces:
        if tensor in source.carried:
            return source.carried[tensor]
        dtype, (entry, _) = as_dtype(source.dtypes.get(tensor, source.dtype)), entries[tensor][0]
        shape = entry.shape_on_disk(params[entry.path].shape)
        return Pieces(shape, dtype, lambda: [read_tensor(params, entries[tensor]).astype(dtype, copy=False)])

    if max_shard_size is not None:
        shards = split_shards(shards, pieces, max_shard_size)
    if folder is None:
        read_checkpoint(shards, pieces)
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, shards, pieces)
    config = saved_config(source.config, dtype=source.dtype, changed=changed)
    write_whole(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


IndexedEntry = tuple[TensorEntry, tuple[int, ...]]


def entries_of(params: dict[str, jax.Array], tensor_map: Sequence[TensorEntry]) -> dict[str, list[IndexedEntry]]:
    """Tensor -> the entries stored in it, each with its index in our array."""
    entries: dict[str, list[IndexedEntry]] = {}
    for entry in tensor_map:
        for tensor, index in entry.tensors(params[entry.path].shape):
            entries.setdefault(tensor, []).append((entry, index))
    return entries


def read_tensor(params: dict[str, jax.Array], entries: list[IndexedEntry]) -> np.ndarray:
    """One tensor as saved on disk, assembled from the arrays of its entries; float32."""
    entry, index = entries[0]
    if entry.tensor_slice is None:
        return slice_on_host(params[entry.path], index)
    whole = np.empty(entry.shape_on_disk(params[entry.path].shape), np.float32)
    for entry, index in entries:
        entry.put(slice_on_host(params[entry.path], index), whole)
    return whole


# Resizing the vocabulary

_TABLES = ("embed.weight", "layer_embed.table.weight")  # paths within a trunk


def resized_source(source: Source, rows: int) -> Source:
    """The source of the same checkpoint with a vocabulary of `rows` tokens."""
    return replace(source, config=resized_config(source.config, rows), resized=True)


def resized_config(config: NativeConfig, rows: int) -> NativeConfig:
    """The config of the same model with a vocabulary of `rows` tokens."""
    raw, changed, arch = config.raw, {"vocab_size": rows}, replace(config.arch, vocab_size=rows)
    if vars(arch).get("layer_embedding") is not None:
        changed["vocab_size_per_layer_input"] = rows
        arch = replace(arch, layer_embedding=replace(arch.layer_embedding, rows=rows))
    if "text_config" in raw:  # a vision-language model
        changed = {"text_config": raw["text_config"] | changed}
    return replace(config, raw=raw | changed, arch=arch)


def resized_table(table: jax.Array, rows: int) -> jax.Array:
    """Resize `[V, D]` to `[rows, D]`, or a bias `[V]` to `[rows]`. New rows are the mean of the old ones.

    transformers (`mean_resizing`) samples them around that mean with 1e-9 times the covariance of the rows.
    """
    new = max(rows - len(table), 0)
    return jnp.concatenate([table[:rows], jnp.broadcast_to(jnp.mean(table, axis=0), (new, *table.shape[1:]))])


def tables_of_tokens(params: Iterable[str]) -> list[str]:
    """The paths of arrays with one row per token, in any trunk."""
    return [path for path in params if path.partition(".")[2] in _TABLES or path.startswith("lm_head.")]


# Loading


Shapes = dict[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class Source:
    """What is needed to save a model in the same form as the checkpoint it was loaded from.

    Tensors are identified by their full name, including the family's prefix even if the file omits it.

    Attributes:
        shards: file name -> its tensors.
        dtypes: tensor -> dtype that it is saved in.
        dtype: dtype of tensors that the files lack; also saved in config.json.
        carried: readers of tensors that the model does not use and that are saved with their values.
        drawn: tensors that the checkpoint lacks and that were initialized.
        resized: whether the vocabulary was resized after loading.
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
    sharding_of: ShardingRule | None = None,
) -> tuple[dict[str, jax.Array], Source]:
    """Read the weights of a checkpoint. A head other than the config's is dropped, and a missing head is initialized.

    Args:
        config: the parsed config. Its folder holds safetensors, single or sharded, or pytorch_model.bin if torch is
            installed.
        dtype: "float32", "bfloat16" or "float16" rounds the weights to that dtype; "auto" keeps each tensor's own.
            The arrays returned are float32 either way; the dtype is used again when they are saved.
        seed: a head that the checkpoint lacks is initialized as after `torch.manual_seed(seed)`; a generator continues
            from its current state.
        as_stored: return arrays in that dtype instead of float32, for weights that are not trained.
        formats: paths of weights to quantize while reading; each is replaced by `<path>.codes` and so on.
        bits: paths of weights to keep as raw 16-bit values in `<path>.codes`, if they are stored in 16 bits.
        sharding_of: a parameter's logical axes and shape -> its sharding, for several devices.

    Raises:
        FileNotFoundError, ValueError: a file, tensor or key is missing or wrong; the message names it.
        MemoryError: an array does not fit into host or device memory.
    """
    files = open_files(config.path.parent)
    _, shapes = config.abstract
    table = match(config, files, shapes)
    if table.has_own_head:
        config = config.untied()
        _, shapes = config.abstract
        table = match(config, files, shapes)
    absent = {entry.tensor for entry in table.tensor_map}.difference(table.on_disk)
    missing = [draw for draw in config.draws() if draw.tensor in absent]
    new = _draw(config, missing, table.tensor_map, shapes, seed)
    reader, params = ArrayReader(files, table.on_disk, dtype, config.family.in_float32), {}
    axes = {} if sharding_of is None else logical_axes(config.model)
    with text.out_of_memory_names(config.path.parent):
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
                params[path] = reader.array(entry, shape, stored, sharding_of and sharding_of(axes[path], shape))
    return params, _source(config, reader, table, missing)


def outline(
    config: NativeConfig,
    *,
    dtype: str,
    as_stored: bool = False,
    formats: dict[str, Format] | None = None,
    bits: Collection[str] = (),
) -> tuple[Shapes, Source]:
    """What `load` would return, with shapes instead of arrays, from config.json alone. Assumes that the checkpoint
    lacks the tensors that checkpoints of this architecture usually lack.

    Raises:
        ValueError: `as_stored` needs the stored dtype, but neither `dtype` nor config.json names it.
    """
    _, shapes = config.abstract
    tensor_map = make_tensor_map(shapes, config.names)
    has_head = architecture(config.family, config.head.kind) in (config.raw.get("architectures") or [])
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
            f"{config.path} does not say which dtype the weights are stored in, and dtype is 'auto'. Set the dtype: "
            "--dtype bfloat16."
        )
    return str(stated)


def _draw(
    config: NativeConfig, missing: list[Draw], tensor_map: list[TensorEntry], shapes: Shapes, seed: Any
) -> dict[str, jax.Array]:
    """Initialize the arrays that the checkpoint lacks, in order, from one generator."""
    generator = seed if isinstance(seed, TorchGenerator) else TorchGenerator(seed)
    generator.skip(config.head.unused(config.arch))  # also if nothing is missing: an adapter is drawn next
    path_of, new = {entry.tensor: entry.path for entry in tensor_map}, {}
    for draw in missing:
        shape = shapes[path_of[draw.tensor]].shape
        new[path_of[draw.tensor]] = jnp.asarray(draw.values(generator, shape), jnp.float32)
    if missing:
        names, folder = ", ".join(_tensors(missing)), config.path.parent
        level = logging.INFO if config.head.kind == "score" else logging.WARNING
        message = "%s has no %s: initialized from a normal distribution with seed %d."
        logger.log(level, message, folder, names, generator.seed)
    return new


def _tensors(draws: Iterable[Draw]) -> tuple[str, ...]:
    """The names without duplicates: some tensors are drawn twice."""
    return tuple(dict.fromkeys(draw.tensor for draw in draws))


def _source(config: NativeConfig, reader: ArrayReader, table: Matched, missing: list[Draw]) -> Source:
    files, dtype, raw = reader.files, reader.dtype, config.raw
    pattern, read = re.compile(config.family.carried or "(?!)"), set(reader.on_disk.values())
    carried = {name for name in files.shapes if pattern.search(name) and name not in read}
    full = {disk: name for name, disk in reader.on_disk.items()} | {name: name for name in carried}
    shards = {file: [full[name] for name in tensors if name in full] for file, tensors in files.shards.items()}
    dtypes = {full[name]: reader.dtype_of(name) for name in full if name not in carried}
    stored = raw.get("dtype") or raw.get("torch_dtype") or next(iter(dtypes.values()))
    pieces = {name: _carried(reader, name) for name in carried}
    return Source(
        config, shards, dtypes, stored if dtype == "auto" else dtype, table.tensor_map, pieces, _tensors(missing)
    )


def _carried(reader: ArrayReader, name: str) -> Pieces:
    """A tensor that is saved without being used: floats in the dtype of the model, as in transformers."""
    files = reader.files
    stored = as_dtype(files.dtypes[name])
    dtype = as_dtype(reader.dtype_of(name)) if jnp.issubdtype(stored, jnp.floating) else stored
    return Pieces(files.shapes[name], dtype, lambda: [files.read(name).astype(dtype, copy=False)])


# Matching the tensors on disk with those of the model


_OLD_NORMS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


class Matched(NamedTuple):
    """The result of `match`.

    Attributes:
        tensor_map: the tensor map for these files.
        on_disk: full name of a tensor -> its name on disk.
        has_own_head: whether the files have a separate head although config.json says that it is tied to the embedding.
    """

    tensor_map: list[TensorEntry]
    on_disk: dict[str, str]
    has_own_head: bool


def match(config: NativeConfig, files: Files, shapes: dict[str, Any]) -> Matched:
    """Match the files of a checkpoint with the shapes of a model's parameters, before anything is allocated.

    Raises:
        ValueError: a tensor is missing, unexpected, has the wrong shape, or a dtype that cannot be read.
    """
    tensor_map = with_fused_experts(make_tensor_map(shapes, config.names), shapes, files.shapes)
    tensor_map = _with_stored_names(tensor_map, config, files)
    expected = {
        tensor: entry.shape_on_disk(shapes[entry.path].shape)
        for entry in tensor_map
        for tensor, _ in entry.tensors(shapes[entry.path].shape)
    }
    on_disk = _full_names(config, files, set(expected))
    adopt_head(config, files, on_disk, expected)
    files.check_dtypes(on_disk.values())
    embedding = next(entry.tensor for entry in tensor_map if entry.path.endswith(".embed.weight"))
    check_dropped(config, on_disk)
    _leave_layers_out(config, on_disk, set(expected))
    _check(config, files, on_disk, expected)
    return Matched(tensor_map, on_disk, has_own_head(config, files, on_disk, embedding))


def _with_stored_names(tensor_map: list[TensorEntry], config: NativeConfig, files: Files) -> list[TensorEntry]:
    """Keep legacy tensor names of older checkpoints, which transformers accepts too."""

    def occurring(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        return [(current, prefix) for current, prefix in pairs if any(name.startswith(prefix) for name in files.shapes)]

    base = config.family.base_prefix
    of_text = occurring((base, prefix) for prefix in config.family.other_prefixes)
    of_vision = () if config.vision_arch is None else occurring(config.vision.prefixes)

    def stored(entry: TensorEntry) -> TensorEntry:
        for current, prefix in of_vision if entry.path.startswith("vision.") else of_text:
            entry = replace(entry, tensor=_with_prefix(entry.tensor, current, prefix))
        return entry

    tensor_map = [stored(entry) for entry in tensor_map]
    first, *others = config.family.language_heads or ("",)
    if first not in files.shapes and set(others) & set(files.shapes):
        tensor_map = [replace(entry, tensor=_with_prefix(entry.tensor, first, *others)) for entry in tensor_map]
    if not any(name.endswith("LayerNorm.gamma") for name in files.shapes):
        return tensor_map
    ending = re.compile(f"(?:{'|'.join(map(re.escape, _OLD_NORMS))})$")
    return [replace(entry, tensor=ending.sub(lambda match: _OLD_NORMS[match[0]], entry.tensor)) for entry in tensor_map]


def _with_prefix(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def _full_names(config: NativeConfig, files: Files, expected: set[str]) -> dict[str, str]:
    """Full name -> name on disk, without tensors that are ignored or carried. Base models omit the prefix on disk."""
    family = config.family
    bare = not any(name.startswith((family.base_prefix, *family.other_prefixes)) for name in files.shapes)
    dropped = family.ignored if family.carried is None else (*family.ignored, family.carried)
    names = {}
    for name in files.shapes:
        of_head = name.startswith(config.head.prefixes) or of_other_head(config, name)
        full = name if of_head or not bare else family.base_prefix + name
        if full in expected or not any(re.search(pattern, name) for pattern in dropped):
            names[full] = name
        elif name.startswith(config.head.prefixes):
            logger.warning(
                "%s: %s is dropped because a %s does not have it, as in transformers.", config.path.parent, name,
                architecture(family, config.head.kind),
            )  # fmt: skip
    return names


def _leave_layers_out(config: NativeConfig, on_disk: dict[str, str], expected: set[str]) -> None:
    """Remove the last layers from `on_disk` if from_pretrained was asked for fewer layers than config.json has."""
    count, folder = config.arch.num_layers, config.path.parent
    numbers = {name: re.search(r"\.(\d+)\.", name) for name in on_disk.keys() - expected}
    beyond = [name for name, number in numbers.items() if number and int(number[1]) >= count]
    if not beyond or read_native_config(folder, config.head.kind).arch.num_layers <= count:
        return
    logger.warning("%s: only the first %d layers are loaded, as requested.", folder, count)
    for name in beyond:
        del on_disk[name]


def _check(config: NativeConfig, files: Files, on_disk: dict[str, str], expected: dict[str, tuple[int, ...]]) -> None:
    folder, family = config.path.parent, config.family
    missing = sorted(set(expected) - set(on_disk) - {draw.tensor for draw in config.draws()})
    unexpected = sorted(name for name in set(on_disk) - set(expected) if not of_other_head(config, name))
    if missing or unexpected:
        raise ValueError(
            f"{folder}: the weights do not fit config.json (model_type {family.model_type!r}). "
            f"Missing: {_some(missing)}. Unexpected: {_some(unexpected)}. Use the config.json of this checkpoint."
        )
    wrong = [
        f"{name} is {brief(list(files.shapes[on_disk[name]]))}, but config.json requires {list(shape)}"
        for name, shape in expected.items()
        if name in on_disk and files.shapes[on_disk[name]] != tuple(shape)
    ]
    if wrong:
        raise ValueError(f"{folder}: wrong shapes: {_some(wrong)}. {ONE_LABEL}")


def _some(items: list[str]) -> str:
    return listed(items, separator="; ") or "none"


# Heads: renamed, dropped or untied, and the config.json to save


def architecture(family: Family, head: HeadName) -> str:
    """The transformers class that loads the saved model."""
    if head == "score":
        return f"{family.class_prefix}ForSequenceClassification"
    modeling_auto = import_module("transformers.models.auto.modeling_auto")  # `from` needs torch
    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return (names | modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)[family.model_type]


def of_other_head(config: NativeConfig, name: str) -> bool:
    """Whether a tensor belongs to the head that is not loaded."""
    family = config.family
    return name in family.language_heads or (config.head.kind == "lm" and name.startswith(family.score_head.prefixes))


def adopt_head(
    config: NativeConfig, files: Files, on_disk: dict[str, str], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Use a differently named head as `score.weight`: the only unmatched tensor, if it has the shape of the head.

    Changes `on_disk` (full name -> name on disk); `expected` has the shapes of the model's tensors.
    """
    unknown = sorted(name for name in set(on_disk) - set(expected) if not of_other_head(config, name))
    if "score.weight" not in set(expected) - set(on_disk) or len(unknown) != 1:
        return
    name = on_disk[unknown[0]]
    if files.shapes[name] == tuple(expected["score.weight"]):
        folder = config.path.parent
        logger.warning("%s: %s has the shape of the score head and is loaded and saved as score.weight.", folder, name)
        on_disk["score.weight"] = on_disk.pop(unknown[0])


def check_dropped(config: NativeConfig, on_disk: Collection[str]) -> None:
    """Raise ValueError if the language model head that config.json promises is missing. Such a checkpoint may be
    broken, even though that head would be dropped."""
    heads, named = config.family.language_heads, str((config.raw.get("architectures") or [""])[0])
    if config.head.kind == "lm" or not heads or not named.endswith("ForCausalLM"):
        return
    if not config.arch.tied_embeddings and not set(heads) & set(on_disk):
        raise ValueError(
            f"{config.path.parent}: config.json says architectures=[{named!r}] and tie_word_embeddings=false, but the "
            f"weights have no {heads[0]}. Set tie_word_embeddings to true if the head shares the embedding's weights."
        )


def has_own_head(config: NativeConfig, files: Files, on_disk: Mapping[str, str], embedding: str) -> bool:
    """Whether the files hold a language model head that differs from the embedding although config.json says that they
    are tied. The files win, as in transformers. `embedding` is the full name of the token embedding."""
    head = next((name for name in config.family.language_heads if name in on_disk), None)
    if not config.is_tied or head is None or embedding not in on_disk:
        return False
    if np.array_equal(files.read(on_disk[head]), files.read(on_disk[embedding])):
        return False
    logger.warning(
        "%s: config.json says tie_word_embeddings=true, but %s differs from %s. The head keeps its own weights, as in "
        "transformers, and is saved untied.", config.path.parent, head, on_disk[embedding],
    )  # fmt: skip
    return True


def saved_config(config: NativeConfig, *, dtype: str, changed: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the checkpoint's config.json that differs only where TRL's save would change it.

    Args:
        dtype: name of the dtype on disk.
        changed: keys that training or user code has set, such as token ids; keys of a nested config such as text_config
            are nested.
    """
    raw, head = config.raw, config.head.kind
    written = {**raw, "architectures": [architecture(config.family, head)]}
    if head == "score":
        written |= {"use_cache": False, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        written.pop("num_labels", None)  # transformers derives it from id2label
    written.pop("torch_dtype", None)
    written["dtype"] = dtype
    for part in config_class(config.family.model_type).sub_configs:
        if isinstance(written.get(part), dict):
            values = {key: value for key, value in written[part].items() if key != "torch_dtype"}
            written[part] = values | {"dtype": dtype}
    if "text_config" not in raw:  # older files keep these keys at the top level
        changed = dict(changed)
        changed |= changed.pop("text_config", {})
    return _with(written, changed)


def _with(written: dict[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    inner = {key: value for key, value in changed.items() if isinstance(value, dict)}
    parts = {key: _with(written[key], value) for key, value in inner.items() if isinstance(written.get(key), dict)}
    return written | dict(changed) | parts


# Reading arrays


Files = CheckpointFiles | GgufFiles | PickledFiles


def open_files(folder: Path) -> Files:
    """Open the weights in a folder: GGUF, pytorch_model.bin, or safetensors with or without MXFP4."""
    if (folder / LINK).exists():
        return GgufFiles(folder / LINK)
    if only_pickled(folder):
        return PickledFiles(folder)
    files = CheckpointFiles(folder)
    return Mxfp4Files(folder) if any(name.endswith(BLOCKS) for name in files.shapes) else files


@dataclass(frozen=True)
class ArrayReader:
    """Read our arrays one at a time.

    Attributes:
        files: the opened weights.
        on_disk: full name of a tensor -> its name in `files`.
        dtype: dtype that values are rounded to; "auto" keeps each tensor's own.
        in_float32: pattern of the tensor names that stay float32 while others are 16-bit.
    """

    files: Files
    on_disk: dict[str, str]
    dtype: str
    in_float32: str | None = None

    def dtype_of(self, name: str) -> str:
        """The dtype in which a tensor, named as in `files`, is read."""
        dtype = self.files.dtypes[name] if self.dtype == "auto" else self.dtype
        return "float32" if dtype in HALVES and self.in_float32 and re.search(self.in_float32, name) else dtype

    def stored_dtype(self, entry: TensorEntry) -> Any:
        """The dtype of an array that keeps its stored dtype: the one of its first tensor, or the one that all are
        rounded to."""
        return jnp.dtype(self.dtype_of(self.on_disk[entry.tensor.format(*[entry.first] * entry.stacked)]))

    def array(self, entry: TensorEntry, shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> jax.Array:
        """One of our arrays, on one device or with the given sharding."""
        if sharding is None:
            return self._assemble(entry, shape, dtype, lambda values: values.astype(dtype, copy=False))
        return read_sharded(self._read_part, entry, shape, self.on_disk, sharding, dtype)

    def bits(self, entry: TensorEntry, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """The raw bits of an array of 16-bit floats, as uint16."""
        return self._assemble(entry, shape, jnp.uint16, lambda x: x.astype(dtype, copy=False).view(np.uint16))

    def quantized(self, entry: TensorEntry, shape: tuple[int, ...], form: Format) -> dict[str, jax.Array]:
        """The arrays of a quantized weight, by path. Each tensor is quantized as it is read, so that the full weight
        never exists in floating point."""
        leading, leaves = shape[: entry.stacked], form.leaves()
        arrays = {name: np.empty((*leading, *inner), kind) for name, (inner, kind) in leaves.items()}
        for tensor, index in entry.tensors(shape):
            for name, values in quantized(entry.take(self._read(self.on_disk[tensor])), form).items():
                arrays[name][index] = values
        return {f"{entry.path}.{name}": owned(values) for name, values in arrays.items()}

    def _assemble(self, entry: TensorEntry, shape: tuple[int, ...], dtype: Any, convert: Any) -> jax.Array:
        """Fill an array tensor by tensor, with one extra tensor in memory at a time (or a second copy, if small)."""

        def read(tensor: str) -> np.ndarray:
            return convert(entry.take(self._read(self.on_disk[tensor])))

        tensors = entry.tensors(shape)
        if not entry.stacked:  # copy, because JAX cannot donate NumPy's memory
            return owned(read(tensors[0][0]).astype(dtype, copy=False))
        if math.prod(shape) * np.dtype(dtype).itemsize <= SMALL:  # avoids compiling a program for its shape
            host = np.empty(shape, dtype)
            for tensor, index in tensors:
                host[index] = read(tensor)
            return owned(host)
        array = jnp.zeros(shape, dtype)
        for tensor, index in tensors:
            values = read(tensor)
            array = jax.block_until_ready(_set_at(array, values, np.asarray(index)))
        return array

    def _read(self, tensor: str) -> np.ndarray:
        values = self.files.read(tensor)
        if isinstance(self.files, CheckpointFiles):
            self.files.release(tensor, values.nbytes)
        return self._rounded(tensor, values)

    def _read_part(self, tensor: str, index: Index | None) -> np.ndarray:
        """Read part of a tensor. Only safetensors files can avoid reading the whole tensor."""
        if index is None or not isinstance(self.files, CheckpointFiles):
            values = self.files.read(tensor)
            values = values if index is None else values[index]
        else:
            values = self.files.read_part(tensor, index)
            self.files.release(tensor, values.nbytes)
        return self._rounded(tensor, values)

    def _rounded(self, tensor: str, values: np.ndarray) -> np.ndarray:
        dtype = self.dtype_of(tensor)
        return values if dtype == self.files.dtypes[tensor] else values.astype(as_dtype(dtype))


@partial(jax.jit, donate_argnums=0)
def _set_at(array: jax.Array, values: jax.Array, index: jax.Array) -> jax.Array:
    return array.at[tuple(index)].set(values.astype(array.dtype))


# Slices on the host: XLA takes longer to compile a program for each shape than to run it.

SMALL = 64 << 20  # bytes


def slice_on_host(array: jax.Array | np.ndarray, index: tuple[int, ...]) -> np.ndarray:
    """`array[index]` on the host; a small array is copied there as a whole first."""
    if isinstance(array, jax.Array) and array.is_fully_addressable and array.nbytes <= SMALL:
        array = np.asarray(array)
    return np.asarray(array[index])


# Processor files, which vLLM and transformers expect in a multimodal checkpoint

_NAMES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def keep_processor_files(before: Path, folder: Path) -> None:
    """Copy the processor files of a checkpoint from the folder `before` to the one that it is saved to.

    A chat template in them is left out: processors would prefer it to the one that is saved with the tokenizer.
    """
    for name in _NAMES:
        if (before / name).is_file() and not (folder / name).exists():
            settings = files.read(before / name)
            if settings.pop("chat_template", None) is None:
                shutil.copyfile(before / name, folder / name)
            else:
                (folder / name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def save_processor(processor: Any, folder: Path) -> None:
    """Write a processor's settings to processor_config.json, and its class to the tokenizer's, as its `save_pretrained`
    does. Its tokenizer and its chat template are left out: the trainer's own were saved."""
    (folder / "processor_config.json").write_text(processor.to_json_string(), encoding="utf-8")
    path, name = folder / "tokenizer_config.json", type(processor).__name__
    settings = json.loads(path.read_text(encoding="utf-8"))
    if settings.get("processor_class") != name:
        text = json.dumps(settings | {"processor_class": name}, indent=2, sort_keys=True, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


# Sharded reading: each device's part is read on its own.

Index = tuple[slice, ...]
Read = Callable[[str, Index | None], np.ndarray]  # reads a tensor on disk, or part of it
ShardingRule = Callable[[tuple[str, ...], tuple[int, ...]], Any]  # a parameter's logical axes and shape -> its sharding


def read_sharded(
    read: Read,
    entry: TensorEntry,
    shape: tuple[int, ...],
    names: dict[str, str],
    sharding: Any,
    dtype: Any = np.float32,
) -> jax.Array:
    """Read one of our arrays, with the given sharding. Each process only reads the parts of its own devices.

    In addition to the array, the host holds one device's part, and briefly two copies of it.
    """
    indices = sharding.addressable_devices_indices_map(shape)
    devices_of: dict[tuple, list[Any]] = {}
    for device, index in indices.items():
        ends = tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))
        devices_of.setdefault(ends, []).append(device)
    parts = {}
    for ends, devices in devices_of.items():
        values = _read_part(read, entry, shape, names, tuple(slice(*axis) for axis in ends), dtype)
        parts |= {device: jax.device_put(values, device, may_alias=False) for device in devices}
        del values
        jax.block_until_ready([parts[device] for device in devices])  # the host values are held until then
    return jax.make_array_from_single_device_arrays(shape, sharding, [parts[device] for device in indices])


def shard_array(sharding_of: ShardingRule, axes: tuple[str, ...], array: jax.Array) -> jax.Array:
    """Shard an array that each process holds in full; `sharding_of` maps its logical `axes` and shape to a sharding."""
    values = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding_of(axes, array.shape), lambda index: values[index])


def _read_part(
    read: Read, entry: TensorEntry, shape: tuple[int, ...], names: dict[str, str], index: Index, dtype: Any
) -> np.ndarray:
    part = np.empty([axis.stop - axis.start for axis in index], dtype)
    stacked, inner = index[: entry.stacked], index[entry.stacked :]
    for tensor, at in entry.tensors(shape):
        if all(axis.start <= number < axis.stop for axis, number in zip(stacked, at, strict=True)):
            place = tuple(number - axis.start for axis, number in zip(stacked, at, strict=True))
            part[place] = _read_values(read, entry, names[tensor], inner)
    return part


def _read_values(read: Read, entry: TensorEntry, tensor: str, inner: Index) -> np.ndarray:
    """Read our values from a tensor. A fused tensor is read as a whole because our values are not contiguous in it."""
    return read(tensor, inner) if entry.tensor_slice is None else entry.take(read(tensor, None))[inner]
