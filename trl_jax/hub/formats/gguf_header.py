"""Checks the fields of a GGUF file before the gguf package reads them, which trusts every length."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by its type
_STRING, _ARRAY = 8, 9
_LONGEST = 1 << 24  # entries of an array: vocabularies have some hundred thousand
_FIELDS = 1 << 16


def check_fields(path: Path) -> None:
    """Walk over the fields of a file.

    Raises:
        ValueError: one of them claims more than the file holds, or than any such file has.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        magic, version, _, fields = struct.unpack("<4sIQQ", _read(file, 24))
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r} and version {version}, wanted b'GGUF' and 2 or 3")
        if fields > _FIELDS:
            raise ValueError(f"it claims {fields:,} fields")
        for _ in range(fields):
            _skip(file, _number(file, 8), size)
            _skip_value(file, _number(file, 4), size)


def _skip_value(file: BinaryIO, kind: int, size: int) -> None:
    if kind == _ARRAY:
        inner, count = _number(file, 4), _number(file, 8)
        if inner == _ARRAY or count > _LONGEST:
            raise ValueError(f"a field claims an array of {count:,} entries of type {inner}")
        if inner in _SIZES:
            _skip(file, count * _SIZES[inner], size)
            return
        for _ in range(count):
            _skip_value(file, inner, size)
    elif kind == _STRING:
        _skip(file, _number(file, 8), size)
    elif kind in _SIZES:
        _skip(file, _SIZES[kind], size)
    else:
        raise ValueError(f"a field claims the type {kind}, which there is not")


def _skip(file: BinaryIO, count: int, size: int) -> None:
    if count > size - file.tell():
        raise ValueError(f"a field claims {count:,} bytes at byte {file.tell():,} of {size:,}")
    file.seek(count, 1)


def _number(file: BinaryIO, width: int) -> int:
    return int.from_bytes(_read(file, width), "little")


def _read(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise ValueError("it ends in the middle of its fields")
    return data
