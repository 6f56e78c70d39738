"""Atomic file writes, strict JSON, and streaming writes of safetensors files."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trl_jax.core import text
from trl_jax.core.text import brief

# JSON. Duplicate names in an object are an error, because parsers disagree on which value wins.


def loads(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: the text is not valid JSON, or an object has a duplicate name; the message says which.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_unique_names)


def read(path: Path) -> Any:
    """Parse a UTF-8 JSON file. Errors as for `loads`, and a MemoryError that names the file."""
    with text.out_of_memory_names(path):
        return loads(path.read_text(encoding="utf-8"))


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        duplicate = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"duplicate name {brief(duplicate)} in a JSON object: keep one of the two")
    return values


# Safetensors files, written piece by piece so that the tensors are never all in memory

# NumPy dtype -> safetensors dtype (https://github.com/huggingface/safetensors#format)
SAFETENSORS_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
WEIGHT_DTYPES = ("float32", "bfloat16", "float16")  # in which weights are read and saved


class Pieces(NamedTuple):
    """A tensor that is read in consecutive pieces, in C order."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], Iterable[np.ndarray]]


def as_dtype(word: str) -> np.dtype:
    """The NumPy dtype for a NumPy or safetensors dtype name."""
    return np.dtype({ours: theirs for theirs, ours in SAFETENSORS_DTYPES.items()}.get(word, word))


def write_tensors(path: Path, tensors: Mapping[str, Pieces], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, in the order of `in_order`. Each tensor is read only when it is written.

    Raises:
        ValueError: a tensor's pieces do not add up to the size that its shape and dtype imply.
    """
    tensors = {name: tensors[name] for name in in_order(tensors)}
    sizes = {name: tensor.dtype.itemsize * math.prod(tensor.shape) for name, tensor in tensors.items()}
    with path.open("wb") as file:
        header = _header(tensors, sizes, metadata)
        file.write(len(header).to_bytes(8, "little") + header)
        for name, tensor in tensors.items():
            written = 0
            for piece in tensor.read():
                written += file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
                del piece  # free it before the next piece is read
            if written != sizes[name]:
                raise ValueError(f"{path}: tensor {name} should have {sizes[name]:,} bytes, but {written:,} were read.")


def in_order(tensors: Mapping[str, Pieces]) -> list[str]:
    """Tensor names by item size, largest first, then alphabetically. This is the order of the safetensors library and
    keeps every tensor aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def _header(tensors: Mapping[str, Pieces], sizes: Mapping[str, int], metadata: Mapping[str, str] | None) -> bytes:
    entries, start = {} if metadata is None else {"__metadata__": dict(metadata)}, 0
    for name, tensor in tensors.items():
        entries[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + sizes[name]],
        }
        start += sizes[name]
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)  # pad, so that the tensors are aligned


# Atomic writes: write to a temporary file next to the target, then rename it


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path. On success it replaces `path`; on an exception, `path` is left unchanged. If `path` is a
    symlink, the link is replaced, not its target."""
    partial = path.with_name(f"{path.name}.part")
    partial.unlink(missing_ok=True)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
