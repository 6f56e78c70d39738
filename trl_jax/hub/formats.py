"""Checkpoint files: safetensors, pickles, and diagnosis of broken files."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open

from trl_jax.core import files, text
from trl_jax.core.files import (
    SAFETENSORS_DTYPES,
    WEIGHT_DTYPES,
    Pieces,
    in_order,
    replacing,
    write_tensors,
    write_whole,
)
from trl_jax.core.text import brief, listed, printable
from trl_jax.hub import torch_bridge
from trl_jax.hub.torch_bridge import PICKLED

# pytorch_model.bin, which torch reads without running code


PICKLED_INDEX = "pytorch_model.bin.index.json"


def only_pickled(folder: Path) -> bool:
    """Whether a folder only has pytorch_model.bin, and torch is installed to read it."""
    safe = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
    return not safe and torch_bridge.available() and any((folder / name).is_file() for name in (PICKLED, PICKLED_INDEX))


class PickledFiles:
    """The tensors of pytorch_model.bin, single or sharded, with the same methods as `CheckpointFiles`."""

    def __init__(self, folder: Path):
        self._tensors: dict[str, Any] = {}
        self.shards: dict[str, list[str]] = {}
        names = [PICKLED] if (folder / PICKLED).is_file() else indexed_shards(folder, PICKLED_INDEX)
        for name in names:
            with text.out_of_memory_names(folder / name):
                tensors = torch_bridge.unpickled(folder / name)
            if twice := tensors.keys() & self._tensors.keys():
                raise ValueError(f"{folder / name} holds the tensor {min(twice)}, which is also in an earlier shard.")
            self.shards[name] = list(tensors)
            self._tensors |= tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.dtypes = {name: torch_bridge.dtype_name(tensor.dtype) for name, tensor in self._tensors.items()}
        self._folder = folder

    def check_dtypes(self, tensors: Iterable[str]) -> None:
        """Raise ValueError for the first of these tensors that has an unsupported dtype."""
        for tensor in tensors:
            if self.dtypes[tensor] not in DTYPES.values():
                raise ValueError(
                    f"{self._folder}: tensor {tensor} has dtype {self.dtypes[tensor]}; trl_jax reads "
                    f"{', '.join(DTYPES.values())}. Save the checkpoint again in one of these."
                )

    def read(self, tensor: str) -> np.ndarray:
        """The values of one tensor, in the file's dtype."""
        return torch_bridge.as_array(self._tensors[tensor])


# Safetensors: checked, read one tensor at a time, and written in the original shards


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_MAPPED = 2**28  # bytes read from a file before its pages are released
DTYPES = {SAFETENSORS_DTYPES[name]: name for name in WEIGHT_DTYPES}


class CheckpointFiles:
    """The tensors of a checkpoint folder, by name. Only headers are read up front.

    Attributes:
        shards: file name -> its tensors, in the file's order.
        shapes: tensor -> shape.
        dtypes: tensor -> "float32", "bfloat16" or "float16"; for other dtypes the file's own name.
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
                raise ValueError(f"{path} holds the tensor {tensor}, which is also in an earlier shard.")
            header = handle.get_slice(tensor)
            dtype = header.get_dtype()
            self.dtypes[tensor], self.shapes[tensor] = DTYPES.get(dtype, dtype), tuple(header.get_shape())
            self._shard_of[tensor] = path.name
        self._handles[path.name] = handle

    def check_dtypes(self, tensors: Iterable[str]) -> None:
        """Raise ValueError for the first of these tensors that has an unsupported dtype."""
        for tensor in tensors:
            if self.dtypes[tensor] not in DTYPES.values():
                raise ValueError(
                    f"{self._folder / self._shard_of[tensor]}: tensor {tensor} has dtype {self.dtypes[tensor]}; "
                    f"trl_jax reads {', '.join(DTYPES)}. Dequantize the checkpoint, or save it again in one of these."
                )

    def read(self, tensor: str) -> np.ndarray:
        """The values of one tensor, in the file's dtype."""
        with text.out_of_memory_names(self._folder / self._shard_of[tensor]):
            return self._handles[self._shard_of[tensor]].get_tensor(tensor)

    def read_part(self, tensor: str, index: tuple[slice, ...]) -> np.ndarray:
        """Part of a tensor; the rest is not read from disk."""
        with text.out_of_memory_names(self._folder / self._shard_of[tensor]):
            return self._handles[self._shard_of[tensor]].get_slice(tensor)[index]

    def release(self, tensor: str, count: int) -> None:
        """Count `count` bytes as read for this tensor, and reopen its file occasionally, because mapped pages count as
        memory of this process until the file is closed. Do not call this after loading: the file may have been
        overwritten by then."""
        shard = self._shard_of[tensor]
        self._read[shard] = self._read.get(shard, 0) + count
        if self._read[shard] > _MAPPED:
            self._handles[shard], self._read[shard] = safe_open(self._folder / shard, framework="numpy"), 0


def shape_of(path: Path, name: str) -> tuple[int, ...] | None:
    """The shape of a tensor in a file; None if the file does not have it."""
    handle = _opened(path)
    return tuple(handle.get_slice(name).get_shape()) if name in handle.keys() else None  # noqa: SIM118 - no mapping


def tensor_names(path: Path) -> list[str]:
    """Names of the tensors in a file."""
    return list(_opened(path).keys())


def read_one(path: Path, name: str) -> np.ndarray:
    """Read one tensor of a file."""
    return _opened(path).get_tensor(name)


def open_tensors(path: Path) -> dict[str, np.ndarray]:
    """Read all tensors of a small file.

    Raises:
        ValueError: the file is unreadable, or has a tensor that is not float32, bfloat16 or float16.
    """
    handle = _opened(path)
    names = list(handle.keys())
    strange = [name for name in names if handle.get_slice(name).get_dtype() not in DTYPES]
    if strange:
        raise ValueError(f"{path}: {brief(strange[0])} is not a floating-point tensor ({', '.join(DTYPES)}).")
    with text.out_of_memory_names(path):
        return {name: handle.get_tensor(name) for name in names}


def _opened(path: Path) -> Any:
    """Open a file and check that its header has no name twice: safetensors would silently use the last such tensor."""
    try:
        with text.out_of_memory_names(path):
            handle = safe_open(path, framework="numpy")
            check_names(path)
    except (SafetensorError, ValueError) as error:
        fault = diagnose(path) or printable(str(error)[:300])
        raise ValueError(f"{path} is not a readable safetensors file: {fault}.") from error
    return handle


def _shard_names(folder: Path) -> list[str]:
    if (folder / SINGLE).is_file():  # takes precedence, as in transformers
        return [SINGLE]
    if not (folder / INDEX).is_file():
        pickled = any(folder.glob("pytorch_model*.bin"))
        raise unconverted_error(str(folder), "folder") if pickled else no_weights_error(str(folder))
    names = indexed_shards(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {len(missing)} of the {len(names)} shards in {INDEX}: {listed(missing, 100)}. Download "
            "them."
        )
    return names


def unconverted_error(where: str, model: str) -> ValueError:
    return ValueError(
        f"{where} only has pytorch_model.bin, which trl_jax can read if torch is installed: pip install "
        f"'trl_jax[torch]'. Or convert it: AutoModel.from_pretrained({model}).save_pretrained(folder)."
    )


def no_weights_error(where: str) -> FileNotFoundError:
    return FileNotFoundError(f"{where} has no weights: neither {SINGLE} nor {INDEX} exists.")


def indexed_shards(folder: Path, index: str = INDEX) -> list[str]:
    """File names in the index, checked to be plain names in that folder; the files may not exist."""
    path = folder / index
    try:
        weight_map = files.read(path)["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a valid index, which is a JSON object with a weight_map from tensors to files: "
            f"{brief(error, 200)}."
        ) from error
    strange = [name for name in names if not isinstance(name, str) or not _plain(name)]
    if strange or not names:
        raise ValueError(
            f"{path} names shards outside its folder, or none at all: {brief(strange, 500)}. Nothing was opened. "
            "Shards must be plain file names. Download the index again."
        )
    return names


def _plain(name: str) -> bool:
    fits = Path(name).name == name and len(name) <= 255  # the limit of common file systems
    return fits and name not in ("", "..") and "\\" not in name and "\0" not in name


def read_checkpoint(shards: dict[str, list[str]], pieces_of: Callable[[str], Pieces]) -> None:
    """Read tensors in the order in which `write_checkpoint` reads them. Reading may be a collective operation, in which
    all processes take part and one writes."""
    for tensors in shards.values():
        pieces = {tensor: pieces_of(tensor) for tensor in tensors}
        for tensor in in_order(pieces):
            deque(pieces[tensor].read(), maxlen=0)


def write_checkpoint(folder: Path, shards: dict[str, list[str]], pieces_of: Callable[[str], Pieces]) -> None:
    """Write `shards` (file name -> tensors) and, for several shards, the index, with one piece of a tensor in memory
    at a time.

    A file replaces the old one once it is complete, because tensors may be read from the old one. Weights that an
    earlier save left in `folder` are removed at the end, so that a reader does not use them.
    """
    weight_map, parameters, size = {}, 0, 0
    for name, tensors in shards.items():
        pieces = {tensor: pieces_of(tensor) for tensor in tensors}
        with replacing(folder / name) as unfinished:
            write_tensors(unfinished, pieces, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        counts = [(math.prod(tensor.shape), tensor.dtype.itemsize) for tensor in pieces.values()]
        parameters += sum(count for count, _ in counts)
        size += sum(count * width for count, width in counts)
    if len(shards) > 1:
        index = {"metadata": {"total_parameters": parameters, "total_size": size}, "weight_map": weight_map}
        write_whole(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    written = {*shards, INDEX} if len(shards) > 1 else set(shards)
    for path in folder.iterdir():
        if path.name not in written and (path.name in (SINGLE, INDEX) or _SHARD.fullmatch(path.name)):
            path.unlink()


def shard_plan(source: dict[str, list[str]], kept: set[str], added: list[str]) -> dict[str, list[str]]:
    """The shards to write: the source's shards without omitted tensors, and new tensors in the last shard."""
    groups = [[tensor for tensor in tensors if tensor in kept] for tensors in source.values()]
    groups = [group for group in groups if group] or [[]]
    groups[-1] = groups[-1] + added
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def split_shards(
    shards: dict[str, list[str]], pieces_of: Callable[[str], Pieces], max_shard_size: int | str
) -> dict[str, list[str]]:
    """The tensors of all shards in files of at most `max_shard_size` bytes; a larger tensor has its own file."""
    pieces = {tensor: pieces_of(tensor) for tensors in shards.values() for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        pieces,
        get_storage_size=lambda tensor: tensor.dtype.itemsize * math.prod(tensor.shape),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    return split.filename_to_tensors


# Diagnosis of files that safetensors refuses, since its errors seldom name the tensor


_OPENINGS = {
    b"version https://git-lfs": "this is a git-LFS pointer instead of the weights: run `git lfs pull`",
    **dict.fromkeys(
        (b"<!", b"<?", b"<h", b"<H"),
        "this is an HTML or XML page, probably an error page saved instead of the file: download it again",
    ),
    b"PK\x03\x04": "this is a zip archive, probably a renamed PyTorch .bin: convert it",
    b"Entry not found": "this is an error message of the Hub, which has no such file",
    b"\x80\x02\x8a": "this is a pickle, probably a renamed PyTorch .bin: convert it",
}
_SIZES = {code: np.dtype(name).itemsize for name, code in SAFETENSORS_DTYPES.items()}  # bytes of a number
_ANOTHER = "download it again"


def diagnose(path: Path) -> str | None:
    """What is wrong with a file that is not valid safetensors, and how to fix it; None if it looks valid."""
    size = path.stat().st_size
    with path.open("rb") as file:
        opening = file.read(64)
        if size < 8:
            return f"it has {size} bytes, perhaps because a download was interrupted: {_ANOTHER}"
        problem = next((problem for mark, problem in _OPENINGS.items() if opening.lstrip().startswith(mark)), None)
        if problem is not None:
            return problem
        if opening.isascii() and b"\0" not in opening:
            return f"it is a text file: {_ANOTHER}"  # content is not shown, because a link may point to any file
        length = int.from_bytes(opening[:8], "little")
        if length > min(size - 8, 100_000_000):
            return f"its header should have {length:,} bytes, but the file has {size:,}: {_ANOTHER}"
        file.seek(8)
        return _faulty_header(file.read(length), size - 8 - length)


def check_names(path: Path) -> None:
    """Raise ValueError if the header of a file that safetensors can read contains a name twice."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        files.loads(file.read(length))


def _faulty_header(header: bytes, data: int) -> str | None:
    """The first error in a header that is followed by `data` bytes of tensors."""
    try:
        tensors = {name: entry for name, entry in files.loads(header).items() if name != "__metadata__"}
        spans = {name: tuple(entry["data_offsets"]) for name, entry in tensors.items()}
        ordered = sorted(tensors, key=lambda name: spans[name])
        reached = 0
        for name in ordered:
            start, end = spans[name]
            fault = _faulty_tensor(tensors[name]["dtype"], tensors[name]["shape"], end - start)
            if fault is None and start != reached:
                fault = f"begins at byte {start:,}, but the previous tensor ends at {reached:,}"
            if fault is None and end > data:
                fault = f"ends at byte {end:,} of {data:,}: the file is truncated, {_ANOTHER}"
            if fault is not None:
                return f"tensor {listed([name])} {fault}"
            reached = end
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"its header is not a JSON object of tensors ({str(error)[:300]}): {_ANOTHER}"
    return f"{data - reached:,} bytes after the last tensor are unused: {_ANOTHER}" if reached < data else None


def _faulty_tensor(dtype: str, shape: list[int], size: int) -> str | None:
    if dtype not in _SIZES:
        reason = "which safetensors does not know or cannot handle; save it as F32, BF16 or F16"
        return f"has dtype {listed([dtype])}, {reason}"
    if not all(type(axis) is int for axis in shape):  # otherwise the product could be a huge list or string
        return f"has shape {brief(shape)} instead of integers: {_ANOTHER}"
    expected = math.prod(shape) * _SIZES[dtype]
    if expected == size:
        return None
    return f"of dtype {dtype} and shape {brief(shape)} needs {expected:,} bytes, but has {size:,}"
