"""Safetensors on disk: checked, read one tensor at a time, and written in the shards they came in."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from trl_jax.core import memory_errors
from trl_jax.core.files import strict_json
from trl_jax.core.files.tensors_file import Pieces, in_order, write_tensors
from trl_jax.core.files.whole_file import replacing, write_whole
from trl_jax.core.printable import brief, listed, printable
from trl_jax.hub.formats.diagnosis import check_names, diagnose

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_MAPPED = 2**28  # bytes read of a file until its pages are released
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class CheckpointFiles:
    """The tensors of a checkpoint folder, by name. Headers are read at once, data only when asked for.

    Attributes:
        shards: file name -> the tensors it holds, in the file's order.
        shapes: tensor -> shape.
        dtypes: tensor -> "float32", "bfloat16" or "float16"; of others the file's own word.
    """

    def __init__(self, folder: Path):
        self.shards: dict[str, list[str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._folder, self._shard_of, self._handles, self._read = folder, {}, {}, {}
        for name in _shard_names(folder):
            self._open(folder / name)

    def _open(self, path: Path) -> None:
        handle = _opened(path)
        self.shards[path.name] = list(handle.keys())
        for tensor in self.shards[path.name]:
            if tensor in self._shard_of:
                raise ValueError(f"{path} holds the tensor {tensor}, which an earlier shard holds too.")
            header = handle.get_slice(tensor)
            dtype = header.get_dtype()
            self.dtypes[tensor], self.shapes[tensor] = DTYPES.get(dtype, dtype), tuple(header.get_shape())
            self._shard_of[tensor] = path.name
        self._handles[path.name] = handle

    def check_dtypes(self, tensors: Iterable[str]) -> None:
        """Refuse the first of these tensors that is in a dtype which cannot be read."""
        for tensor in tensors:
            if self.dtypes[tensor] not in DTYPES.values():
                raise ValueError(
                    f"{self._folder / self._shard_of[tensor]}: tensor {tensor} has dtype {self.dtypes[tensor]}; "
                    f"trl_jax reads {', '.join(DTYPES)}. Dequantise the checkpoint, or save it again in one of these."
                )

    def read(self, tensor: str) -> np.ndarray:
        """The values of one tensor, in the dtype of the file."""
        with memory_errors.naming(self._folder / self._shard_of[tensor]):
            return self._handles[self._shard_of[tensor]].get_tensor(tensor)

    def read_part(self, tensor: str, index: tuple[slice, ...]) -> np.ndarray:
        """The values of a part of it; no other is read from the disk."""
        with memory_errors.naming(self._folder / self._shard_of[tensor]):
            return self._handles[self._shard_of[tensor]].get_slice(tensor)[index]

    def release(self, tensor: str, count: int) -> None:
        """Note that `count` bytes were read of this tensor. A file's pages count as this process's memory until it is
        closed, so now and then it is opened anew; not after loading, when it may have been overwritten."""
        shard = self._shard_of[tensor]
        self._read[shard] = self._read.get(shard, 0) + count
        if self._read[shard] > _MAPPED:
            self._handles[shard], self._read[shard] = safe_open(self._folder / shard, framework="numpy"), 0


def shape_of(path: Path, name: str) -> tuple[int, ...] | None:
    """The shape of a tensor of one file; None where it has none of this name."""
    handle = _opened(path)
    return tuple(handle.get_slice(name).get_shape()) if name in handle.keys() else None  # noqa: SIM118 - no mapping


def tensor_names(path: Path) -> list[str]:
    """The names of the tensors of one file."""
    return list(_opened(path).keys())


def read_one(path: Path, name: str) -> np.ndarray:
    """One tensor of a file."""
    return _opened(path).get_tensor(name)


def open_tensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of one small file.

    Raises:
        ValueError: it cannot be read, or has a tensor of another dtype.
    """
    handle = _opened(path)
    names = list(handle.keys())
    strange = [name for name in names if handle.get_slice(name).get_dtype() not in DTYPES]
    if strange:
        raise ValueError(f"{path}: {brief(strange[0])} is no floating-point tensor of {', '.join(DTYPES)}.")
    with memory_errors.naming(path):
        return {name: handle.get_tensor(name) for name in names}


def _opened(path: Path) -> Any:
    """A handle of safetensors', whose reader takes the last of two tensors of one name without a word."""
    try:
        with memory_errors.naming(path):
            handle = safe_open(path, framework="numpy")
            check_names(path)
    except (SafetensorError, ValueError) as error:
        fault = diagnose(path) or printable(str(error)[:300])
        raise ValueError(f"{path} is not a readable safetensors file: {fault}.") from error
    return handle


def _shard_names(folder: Path) -> list[str]:
    if (folder / SINGLE).is_file():  # transformers, too, reads this one where both are
        return [SINGLE]
    if not (folder / INDEX).is_file():
        pickled = any(folder.glob("pytorch_model*.bin"))
        raise unconverted(str(folder), "folder") if pickled else no_weights(str(folder))
    names = indexed_shards(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {len(missing)} of the {len(names)} shards in {INDEX}: {listed(missing, 100)}. Download "
            "them."
        )
    return names


def unconverted(where: str, model: str) -> ValueError:
    return ValueError(
        f"{where} has its weights only as pytorch_model.bin, which trl_jax reads only where torch is installed: pip "
        f"install 'trl_jax[torch]'. Or convert them: AutoModel.from_pretrained({model}).save_pretrained(folder)."
    )


def no_weights(where: str) -> FileNotFoundError:
    return FileNotFoundError(f"{where} has neither {SINGLE} nor {INDEX}: there are no weights to load.")


def indexed_shards(folder: Path, index: str = INDEX) -> list[str]:
    """The file names in the index, each a plain one of that folder; they need not exist."""
    path = folder / index
    try:
        weight_map = strict_json.read(path)["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not an index: wanted a JSON object with weight_map, tensor to file. Reading it: "
            f"{brief(error, 200)}."
        ) from error
    strange = [name for name in names if not isinstance(name, str) or not _plain(name)]
    if strange or not names:
        raise ValueError(
            f"{path} names shards outside its folder or none at all: {brief(strange, 500)}. Nothing was opened. "
            "Shards are plain file names: download the index again."
        )
    return names


def _plain(name: str) -> bool:
    fits = Path(name).name == name and len(name) <= 255  # the longest that file systems have
    return fits and name not in ("", "..") and "\\" not in name and "\0" not in name


def write_checkpoint(
    folder: Path, shards: dict[str, list[str]], tensor: Callable[[str], Pieces], *, writes: bool = True
) -> None:
    """Write `shards` (file name -> tensors) and, for more than one, the index; one piece of a tensor is in memory at a
    time.

    Where not `writes`, each tensor is read and nothing kept: several processes gather a tensor together, one writes it.
    A file replaces an earlier one when it is complete, for tensors may be read from that. Other files that an earlier
    save left in `folder` are removed at the end: a reader would take their weights for these.
    """
    weight_map, parameters, size = {}, 0, 0
    for name, tensors in shards.items():
        pieces = {one: tensor(one) for one in tensors}
        if not writes:
            for one in in_order(pieces):
                deque(pieces[one].read(), maxlen=0)
            continue
        _write(folder / name, pieces)
        weight_map |= dict.fromkeys(tensors, name)
        counts = [(math.prod(one.shape), one.dtype.itemsize) for one in pieces.values()]
        parameters += sum(count for count, _ in counts)
        size += sum(count * width for count, width in counts)
    if not writes:
        return
    if len(shards) > 1:
        index = {"metadata": {"total_parameters": parameters, "total_size": size}, "weight_map": weight_map}
        write_whole(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    written = {*shards, INDEX} if len(shards) > 1 else set(shards)
    for path in folder.iterdir():
        if path.name not in written and (path.name in (SINGLE, INDEX) or _SHARD.fullmatch(path.name)):
            path.unlink()


def _write(path: Path, tensors: dict[str, Pieces]) -> None:
    with replacing(path) as unfinished:
        write_tensors(unfinished, tensors, {"format": "pt"})


def shard_plan(source: dict[str, list[str]], kept: set[str], added: list[str]) -> dict[str, list[str]]:
    """The shards to write: those of the source without tensors that are left out, new tensors in the last one."""
    groups = [[tensor for tensor in tensors if tensor in kept] for tensors in source.values()]
    groups = [group for group in groups if group] or [[]]
    groups[-1] = groups[-1] + added
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}
