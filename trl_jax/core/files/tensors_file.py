"""Writes a safetensors file piece by piece, so that its tensors are never all in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

# NumPy's dtypes -> the format's (https://github.com/huggingface/safetensors#format).
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


class Pieces(NamedTuple):
    """A tensor whose values are read in pieces, one after another in C order."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], Iterable[np.ndarray]]


def as_dtype(word: str) -> np.dtype:
    """NumPy's dtype of this name, which is NumPy's or the format's."""
    return np.dtype({ours: theirs for theirs, ours in _DTYPES.items()}.get(word, word))


def write_tensors(path: Path, tensors: Mapping[str, Pieces], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors under their names, in the order of `in_order`; each is read when it is written.

    Raises:
        ValueError: a tensor's pieces have more or fewer bytes than its shape and dtype.
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
    """Names by the size of a number, largest first, then by name, as the format's own library writes them: so each
    tensor is aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def _head(tensors: Mapping[str, Pieces], sizes: Mapping[str, int], metadata: Mapping[str, str] | None) -> bytes:
    facts, start = {} if metadata is None else {"__metadata__": dict(metadata)}, 0
    for name, one in tensors.items():
        facts[name] = {
            "dtype": _DTYPES[one.dtype.name], "shape": list(one.shape), "data_offsets": [start, start + sizes[name]]
        }  # fmt: skip
        start += sizes[name]
    text = json.dumps(facts, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)  # so that the tensors are aligned
