"""Write files whole or not at all, read strict JSON, and write tensors from several processes."""

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

# ----------------------------------------------------------------------------------------------------
# JSON in which no object has a name twice: readers differ in which of the values they take.


def loads(text: str | bytes) -> Any:
    """The value of a text of JSON.

    Raises:
        ValueError: it is no JSON, or an object in it has a name twice; the text says which.
        RecursionError: it is too deep.
    """
    return json.loads(text, object_pairs_hook=_object)


def read(path: Path) -> Any:
    """The value of a file of JSON in UTF-8; errors as of `loads`, and MemoryError with the file's name."""
    with text.naming(path):
        return loads(path.read_text(encoding="utf-8"))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the name {brief(twice)} is in one object twice: keep the one that is meant")
    return values


# ----------------------------------------------------------------------------------------------------
# Writes a safetensors file piece by piece, so that its tensors are never all in memory.


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


# ----------------------------------------------------------------------------------------------------
# Files that are there as a whole or not at all: written beside their place and renamed.


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what then takes the place of `path`. Where the block raises, what was there stays. A link of
    either name is replaced, not followed."""
    beside = path.with_name(f"{path.name}.part")
    beside.unlink(missing_ok=True)
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file of text, in UTF-8."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")
