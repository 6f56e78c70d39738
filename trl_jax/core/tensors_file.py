"""A safetensors file written piece by piece: what it holds is never all in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

# The format's words (https://github.com/huggingface/safetensors#format) for NumPy's.
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


class Pieces(NamedTuple):
    """A tensor whose values come one after another, in C order; NumPy's dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], Iterable[np.ndarray]]


def as_dtype(word: str) -> np.dtype:
    """NumPy's, by its own word or the format's."""
    return np.dtype({ours: theirs for theirs, ours in _DTYPES.items()}.get(word, word))


def write_tensors(path: Path, tensors: Mapping[str, Pieces], metadata: Mapping[str, str] | None = None) -> None:
    """Write them under their names; a tensor is read when its turn has come: by the size of its numbers, then its name.

    Raises:
        ValueError: a tensor's pieces are more or less than it says.
    """
    tensors = {name: tensors[name] for name in in_order(tensors)}
    sizes = {name: one.dtype.itemsize * math.prod(one.shape) for name, one in tensors.items()}
    with path.open("wb") as file:
        head = _head(tensors, sizes, metadata)
        file.write(len(head).to_bytes(8, "little") + head)
        for name, one in tensors.items():
            written = 0
            for piece in one.read():
                written += file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
                del piece  # before the next is made
            if written != sizes[name]:
                raise ValueError(f"{path}: {name} of {sizes[name]:,} bytes came in pieces of {written:,}.")


def in_order(tensors: Mapping[str, Pieces]) -> list[str]:
    """As the format's own library has them: each is aligned where it lies."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def _head(tensors: Mapping[str, Pieces], sizes: Mapping[str, int], metadata: Mapping[str, str] | None) -> bytes:
    facts, start = {} if metadata is None else {"__metadata__": dict(metadata)}, 0
    for name, one in tensors.items():
        facts[name] = {
            "dtype": _DTYPES[one.dtype.name], "shape": list(one.shape), "data_offsets": [start, start + sizes[name]]
        }  # fmt: skip
        start += sizes[name]
    text = json.dumps(facts, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)  # so that what follows is aligned
