"""Finds the fault of a file that safetensors refuses; its own errors seldom name the tensor."""

from __future__ import annotations

import math
from pathlib import Path

from trl_jax.core.files import strict_json
from trl_jax.core.printable import brief, listed

_OPENINGS = {
    b"version https://git-lfs": "this is a git-LFS pointer, not the weights: run `git lfs pull`",
    **dict.fromkeys(
        (b"<!", b"<?", b"<h", b"<H"),
        "this is an HTML or XML page, probably an error page saved in place of the file: download it again",
    ),
    b"PK\x03\x04": "this is a zip archive, probably a PyTorch .bin under another name: convert it",
    b"Entry not found": "this is an answer of the Hub, which has no such file",
    b"\x80\x02\x8a": "this is a pickle, probably a PyTorch .bin under another name: convert it",
}
_BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
}
_ANOTHER = "download it again"


def diagnose(path: Path) -> str | None:
    """The fault of a file that is no safetensors file, and the way out; None if it looks like a good one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        opening = file.read(64)
        if size < 8:
            return f"it has {size} bytes, an interrupted download perhaps: {_ANOTHER}"
        known = next((text for mark, text in _OPENINGS.items() if opening.lstrip().startswith(mark)), None)
        if known is not None:
            return known
        if opening.isascii() and b"\0" not in opening:
            return f"it is text: {_ANOTHER}"  # which is not shown: a link may lead to any file
        length = int.from_bytes(opening[:8], "little")
        if length > min(size - 8, 100_000_000):
            return f"its header should have {length:,} bytes, the file has {size:,}: {_ANOTHER}"
        file.seek(8)
        return _faulty_header(file.read(length), size - 8 - length)


def check_names(path: Path) -> None:
    """Raise ValueError where a file that safetensors can read has two tensors of one name in its header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        strict_json.loads(file.read(length))


def _faulty_header(text: bytes, data: int) -> str | None:
    """The first fault of a header before `data` bytes of tensors."""
    try:
        tensors = {name: entry for name, entry in strict_json.loads(text).items() if name != "__metadata__"}
        spans = {name: tuple(entry["data_offsets"]) for name, entry in tensors.items()}
        ordered = sorted(tensors, key=lambda name: spans[name])
        reached = 0
        for name in ordered:
            start, end = spans[name]
            fault = _faulty_tensor(tensors[name]["dtype"], tensors[name]["shape"], end - start)
            if fault is None and start != reached:
                fault = f"begins at byte {start:,}, the tensor before it ends at {reached:,}"
            if fault is None and end > data:
                fault = f"ends at byte {end:,} of {data:,}: the file is cut short, {_ANOTHER}"
            if fault is not None:
                return f"tensor {listed([name])} {fault}"
            reached = end
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"its header is not a JSON object of tensors ({str(error)[:300]}): {_ANOTHER}"
    return f"{data - reached:,} bytes after its last tensor belong to none: {_ANOTHER}" if reached < data else None


def _faulty_tensor(dtype: str, shape: list[int], size: int) -> str | None:
    if dtype not in _BITS:
        known = "which safetensors does not know or cannot size; save it as F32, BF16 or F16"
        return f"has dtype {listed([dtype])}, {known}"
    if not all(type(axis) is int for axis in shape):  # a product with a list or a text would be as long as it says
        return f"has shape {brief(shape)}, wanted whole numbers: {_ANOTHER}"
    wanted = math.prod(shape) * _BITS[dtype] // 8
    if wanted == size:
        return None
    return f"of dtype {dtype} and shape {brief(shape)} takes {wanted:,} bytes, but has {size:,}"
