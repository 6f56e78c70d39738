"""Checkpoint folders to arrays and back."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.core import text
from trl_jax.core.files import Pieces, as_dtype, write_whole
from trl_jax.core.text import brief, listed
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.config import NativeConfig, read_native_config
from trl_jax.hub.families import Family
from trl_jax.hub.formats import CheckpointFiles, PickledFiles, only_pickled, shard_plan, write_checkpoint
from trl_jax.hub.gguf import BLOCKS, LINK, GgufFiles, Mxfp4Files
from trl_jax.hub.heads import ONE_LABEL, Draw, HeadName
from trl_jax.hub.quantization import quantized
from trl_jax.hub.tensor_map import ExpertRows, TensorEntry, make_tensor_map
from trl_jax.mesh.mesh import owned
from trl_jax.models.model import logical_axes
from trl_jax.nn.linear import HALVES, Format

# ----------------------------------------------------------------------------------------------------
# From a flat dict of arrays to a Hugging Face folder.


def save(
    folder: Path,
    params: dict[str, jax.Array],
    source: Source,
    *,
    changed: Mapping[str, Any],
    writes: bool = True,
) -> None:
    """Write config.json and the weights as transformers has them for this model_type and head.

    Names, shards and every config key but those `changed` are those of the source; each tensor has the dtype it was
    loaded in. Where not `writes`, parameters are only read.
    """
    entries = entries_of(params, source)
    known = {tensor for tensors in source.shards.values() for tensor in tensors}
    shards = shard_plan(source.shards, {*entries, *source.carried}, sorted(set(entries) - known))

    def pieces(tensor: str) -> Pieces:
        if tensor in source.carried:
            return source.carried[tensor]
        dtype, (entry, _) = as_dtype(source.dtypes.get(tensor, source.dtype)), entries[tensor][0]
        shape = entry.shape_on_disk(params[entry.path].shape)
        return Pieces(shape, dtype, lambda: [read_tensor(params, entries[tensor]).astype(dtype, copy=False)])

    if not writes:
        write_checkpoint(folder, shards, pieces, writes=False)
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, shards, pieces)
    config = saved_config(source.config, dtype=source.dtype, changed=changed)
    write_whole(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


IndexedEntry = tuple[TensorEntry, tuple[int, ...]]


def entries_of(params: dict[str, jax.Array], source: Source) -> dict[str, list[IndexedEntry]]:
    """Tensor on disk -> the entries that have a slice in it, each with its index in our array."""
    entries: dict[str, list[IndexedEntry]] = {}
    for entry in source.tensor_map:
        for tensor, index in entry.tensors(params[entry.path].shape):
            entries.setdefault(tensor, []).append((entry, index))
    return entries


def read_tensor(params: dict[str, jax.Array], entries: list[IndexedEntry]) -> np.ndarray:
    """One tensor on disk, joined from the arrays of its entries; float32."""
    entry, index = entries[0]
    if entry.tensor_slice is None:
        return taken(params[entry.path], index)
    whole = np.empty(entry.shape_on_disk(params[entry.path].shape), np.float32)
    for entry, index in entries:
        entry.put(taken(params[entry.path], index), whole)
    return whole


# ----------------------------------------------------------------------------------------------------
# Changes the number of rows in the table of tokens, and in the head of a language model.


_TABLES = ("embed.weight", "layer_embed.table.weight")  # of a trunk


def resized_source(source: Source, rows: int) -> Source:
    """The source of a checkpoint that has so many rows."""
    return replace(source, config=resized_config(source.config, rows), resized=True)


def resized_config(config: NativeConfig, rows: int) -> NativeConfig:
    """The config of a model that has so many rows."""
    raw, changed, facts = dict(config.raw), {"vocab_size": rows}, {"vocab_size": rows}
    if vars(config.arch).get("layer_embedding") is not None:
        changed["vocab_size_per_layer_input"] = rows
        facts["layer_embedding"] = replace(config.arch.layer_embedding, rows=rows)
    if "text_config" in raw:  # of a model that reads images too
        changed = {"text_config": raw["text_config"] | changed}
    return replace(config, raw=raw | changed, arch=replace(config.arch, **facts))


def resized_table(table: jax.Array, rows: int) -> jax.Array:
    """`[V, D]` to `[rows, D]`, or a bias `[V]` to `[rows]`: new rows are the mean of the old ones.

    transformers draws them around that mean with a billionth of the rows' covariance (`mean_resizing`).
    """
    new = max(rows - len(table), 0)
    return jnp.concatenate([table[:rows], jnp.broadcast_to(jnp.mean(table, axis=0), (new, *table.shape[1:]))])


def tables_of_tokens(params: Iterable[str]) -> list[str]:
    """The paths of the arrays with a row for each token, whichever trunk they belong to."""
    return [path for path in params if path.partition(".")[2] in _TABLES or path.startswith("lm_head.")]


# ----------------------------------------------------------------------------------------------------
# From a checkpoint folder to a flat dict of float32 arrays.


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
    table = match(config, files, shapes)
    if table.has_own_head:
        config = config.untied()
        _, shapes = config.abstract
        table = match(config, files, shapes)
    wanted = {entry.tensor for entry in table.tensor_map}.difference(table.on_disk)
    missing = [draw for draw in config.draws() if draw.tensor in wanted]
    new = _draw(config, missing, table.tensor_map, shapes, seed)
    reader, params = ArrayReader(files, table.on_disk, dtype, config.family.in_float32), {}
    axes = {} if place is None else logical_axes(config.model)
    with text.naming(config.path.parent):
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


def _source(config: NativeConfig, reader: ArrayReader, table: Matched, missing: list[Draw]) -> Source:
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


# ----------------------------------------------------------------------------------------------------
# Tensors on disk and those that a model wants, by name and shape: both sides must match exactly.


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
    adopt(config, files, on_disk, wanted)
    files.check_dtypes(on_disk.values())
    embedding = next(entry.tensor for entry in tensor_map if entry.path.endswith(".embed.weight"))
    check_dropped(config, on_disk)
    _leave_layers_out(config, on_disk, set(wanted))
    _check(config, files, on_disk, wanted)
    return Matched(tensor_map, on_disk, has_own_head(config, files, on_disk, embedding))


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
    return [replace(entry, tensor=ending.sub(lambda match: _OLD_NORMS[match[0]], entry.tensor)) for entry in tensor_map]


def _with_prefix(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def _full_names(config: NativeConfig, files: Files, wanted: set[str]) -> dict[str, str]:
    """Full name -> name on disk, without what is ignored or carried. The checkpoint of a bare base lacks the prefix."""
    family = config.family
    bare = not any(name.startswith((family.base_prefix, *family.other_prefixes)) for name in files.shapes)
    dropped = family.ignored if family.carried is None else (*family.ignored, family.carried)
    names = {}
    for name in files.shapes:
        of_head = name.startswith(config.head.prefixes) or of_other_head(config, name)
        full = name if of_head or not bare else family.base_prefix + name
        if full in wanted or not any(re.search(pattern, name) for pattern in dropped):
            names[full] = name
        elif name.startswith(config.head.prefixes):
            logger.warning(
                "%s: %s is left out: a %s has none, here as in transformers.", config.path.parent, name,
                architecture(family, config.head.kind),
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


def _check(config: NativeConfig, files: Files, on_disk: dict[str, str], wanted: dict[str, tuple[int, ...]]) -> None:
    folder, family = config.path.parent, config.family
    missing = sorted(set(wanted) - set(on_disk) - {draw.tensor for draw in config.draws()})
    unexpected = sorted(name for name in set(on_disk) - set(wanted) if not of_other_head(config, name))
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


# ----------------------------------------------------------------------------------------------------
# Heads in checkpoints: one under another name, a language model's that is dropped, and the config.json to save.


def architecture(family: Family, head: HeadName) -> str:
    """The class of transformers that loads what is saved."""
    if head == "score":
        return f"{family.class_prefix}ForSequenceClassification"
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return (names | modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)[family.model_type]


def of_other_head(config: NativeConfig, name: str) -> bool:
    """Whether a tensor belongs to the head that the model does not get."""
    family = config.family
    return name in family.language_heads or (config.head.kind == "lm" and name.startswith(family.score_head.prefixes))


def adopt(config: NativeConfig, files: Files, on_disk: dict[str, str], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Take a head of another name for `score.weight`: the one tensor that nothing else accounts for, if it has the
    head's shape. Changes `on_disk`, full name -> name on disk; `wanted` has the shapes of the model's tensors."""
    unknown = sorted(name for name in set(on_disk) - set(wanted) if not of_other_head(config, name))
    if "score.weight" not in set(wanted) - set(on_disk) or len(unknown) != 1:
        return
    name = on_disk[unknown[0]]
    if files.shapes[name] == tuple(wanted["score.weight"]):
        folder = config.path.parent
        logger.warning("%s: %s has the shape of the score head and is read, and saved, as score.weight.", folder, name)
        on_disk["score.weight"] = on_disk.pop(unknown[0])


def check_dropped(config: NativeConfig, on_disk: Collection[str]) -> None:
    """Raise ValueError where the language model's head that config.json speaks of is not there: such a checkpoint may
    be broken, even if that head is dropped."""
    heads, named = config.family.language_heads, str((config.raw.get("architectures") or [""])[0])
    if config.head.kind == "lm" or not heads or not named.endswith("ForCausalLM"):
        return
    if not config.arch.tied_embeddings and not set(heads) & set(on_disk):
        raise ValueError(
            f"{config.path.parent}: config.json says architectures=[{named!r}] and tie_word_embeddings=false, but the "
            f"weights have no {heads[0]}. Set tie_word_embeddings to true if the head is the embedding."
        )


def has_own_head(config: NativeConfig, files: Files, on_disk: Mapping[str, str], embedding: str) -> bool:
    """Whether there is a language model's head that is not the table of tokens, which config.json takes it for: as in
    transformers, the files are right. `embedding` is the full name of that table."""
    head = next((name for name in config.family.language_heads if name in on_disk), None)
    if not config.is_tied or head is None or embedding not in on_disk:
        return False
    if np.array_equal(files.read(on_disk[head]), files.read(on_disk[embedding])):
        return False
    logger.warning(
        "%s: config.json says tie_word_embeddings=true, but %s differs from %s: the head has its own weights, here as "
        "in transformers, and is saved so.", config.path.parent, head, on_disk[embedding],
    )  # fmt: skip
    return True


def saved_config(config: NativeConfig, *, dtype: str, changed: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the checkpoint's config.json for a model with this head: the keys TRL's save changes, and no others.

    Args:
        dtype: the name of the dtype on disk.
        changed: keys that a run or its script has set, such as the ids of tokens; those of a part, such as text_config,
            under its name.
    """
    raw, head = config.raw, config.head.kind
    written = {**raw, "architectures": [architecture(config.family, head)]}
    if head == "score":
        written |= {"use_cache": False, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        written.pop("num_labels", None)  # transformers derives it from id2label
    written.pop("torch_dtype", None)
    written["dtype"] = dtype
    if "text_config" not in raw:  # older files have its keys among their own
        changed = dict(changed)
        changed |= changed.pop("text_config", {})
    return _with(written, changed)


def _with(written: dict[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    inner = {key: value for key, value in changed.items() if isinstance(value, dict)}
    parts = {key: _with(written[key], value) for key, value in inner.items() if isinstance(written.get(key), dict)}
    return written | dict(changed) | parts


# ----------------------------------------------------------------------------------------------------
# Our arrays from the tensors of a checkpoint: rounded, quantised, as bits, or spread over devices.


Files = CheckpointFiles | GgufFiles | PickledFiles


def open_files(folder: Path) -> Files:
    """The weights of a folder, in the format they have."""
    if (folder / LINK).exists():
        return GgufFiles(folder / LINK)
    if only_pickled(folder):
        return PickledFiles(folder)
    files = CheckpointFiles(folder)
    return Mxfp4Files(folder) if any(name.endswith(BLOCKS) for name in files.shapes) else files


@dataclass(frozen=True)
class ArrayReader:
    """Reads our arrays one by one.

    Attributes:
        on_disk: full name of a tensor -> its name in `files`.
        dtype: the dtype that values are rounded to; "auto" keeps each tensor's own.
        in_float32: matches the names of tensors that are float32 where others have sixteen bits.
    """

    files: Files
    on_disk: dict[str, str]
    dtype: str
    in_float32: str | None = None

    def dtype_of(self, name: str) -> str:
        """The dtype that the tensor of this name in `files` is read in."""
        dtype = self.files.dtypes[name] if self.dtype == "auto" else self.dtype
        return "float32" if dtype in HALVES and self.in_float32 and re.search(self.in_float32, name) else dtype

    def stored_dtype(self, entry: TensorEntry) -> Any:
        """The dtype of an array that stays as it is stored: its first tensor's, or the one all are rounded to."""
        return jnp.dtype(self.dtype_of(self.on_disk[entry.tensor.format(*[entry.first] * entry.stacked)]))

    def array(self, entry: TensorEntry, shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> jax.Array:
        """One of our arrays, on one device or laid out as `sharding` says."""
        if sharding is None:
            return self._assemble(entry, shape, dtype, lambda values: values.astype(dtype, copy=False))
        return read_sharded(self._read_part, entry, shape, self.on_disk, sharding, dtype)

    def bits(self, entry: TensorEntry, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """The bits of an array of 16-bit floats, uint16."""
        return self._assemble(entry, shape, jnp.uint16, lambda x: x.astype(dtype, copy=False).view(np.uint16))

    def quantized(self, entry: TensorEntry, shape: tuple[int, ...], form: Format) -> dict[str, jax.Array]:
        """The arrays of a quantised weight, by path; each tensor is quantised when it is read, so that the whole of the
        weights is never there as floats."""
        leading, leaves = shape[: entry.stacked], form.leaves()
        arrays = {name: np.empty((*leading, *inner), kind) for name, (inner, kind) in leaves.items()}
        for tensor, index in entry.tensors(shape):
            for name, values in quantized(entry.take(self._read(self.on_disk[tensor])), form).items():
                arrays[name][index] = values
        return {f"{entry.path}.{name}": owned(values) for name, values in arrays.items()}

    def _assemble(self, entry: TensorEntry, shape: tuple[int, ...], dtype: Any, convert: Any) -> jax.Array:
        """Put the tensors in place one by one: besides the array, one tensor is in memory, or a small array twice."""

        def read(tensor: str) -> np.ndarray:
            return convert(entry.take(self._read(self.on_disk[tensor])))

        tensors = entry.tensors(shape)
        if not entry.stacked:  # a copy: memory of NumPy cannot be donated
            return owned(read(tensors[0][0]).astype(dtype, copy=False))
        if math.prod(shape) * np.dtype(dtype).itemsize <= SMALL:  # nothing is compiled for its shape
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
        """Only these bytes of a safetensors file; other formats give a tensor whole."""
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


# ----------------------------------------------------------------------------------------------------
# Experts that lie on disk as transformers' modules have them: all in one tensor of three axes.


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


# ----------------------------------------------------------------------------------------------------
# Parts of arrays on the host, without a program for each shape: XLA takes longer to make it than to run.


SMALL = 64 << 20  # bytes


def taken(array: jax.Array | np.ndarray, index: tuple[int, ...]) -> np.ndarray:
    """`array[index]` on the host; a small array comes there whole."""
    if isinstance(array, jax.Array) and array.is_fully_addressable and array.nbytes <= SMALL:
        array = np.asarray(array)
    return np.asarray(array[index])


# ----------------------------------------------------------------------------------------------------
# Files of what prepares images and sounds, which vLLM and transformers want beside a model that sees or hears.


_NAMES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def keep_processor_files(before: Path, folder: Path) -> None:
    """Copy those that a checkpoint came with, from the folder `before`, into the one that it is saved to."""
    for name in _NAMES:
        if (before / name).is_file() and not (folder / name).exists():
            shutil.copyfile(before / name, folder / name)


# ----------------------------------------------------------------------------------------------------
# Arrays on several devices from tensors on disk: each device's part is read by itself.


Index = tuple[slice, ...]
Read = Callable[[str, Index | None], np.ndarray]  # a tensor on disk, or a part of it
Placement = Callable[[tuple[str, ...], tuple[int, ...]], Any]  # a parameter's logical axes and shape -> its sharding


def read_sharded(
    read: Read,
    entry: TensorEntry,
    shape: tuple[int, ...],
    names: dict[str, str],
    sharding: Any,
    dtype: Any = np.float32,
) -> jax.Array:
    """One of our arrays, laid out as `sharding` says; only this process's devices get their parts.

    Besides the array, the host holds the part of one device; twice for a moment.
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
        jax.block_until_ready([parts[device] for device in devices])  # until then they hold the values, too
    return jax.make_array_from_single_device_arrays(shape, sharding, [parts[device] for device in indices])


def shard_array(place: Placement, axes: tuple[str, ...], array: jax.Array) -> jax.Array:
    """An array that every process has, laid out as `place` says of its logical `axes`."""
    values = np.asarray(array)
    return jax.make_array_from_callback(array.shape, place(axes, array.shape), lambda index: values[index])


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
    """A fused tensor is read whole: our numbers are scattered over it."""
    return read(tensor, inner) if entry.tensor_slice is None else entry.take(read(tensor, None))[inner]
