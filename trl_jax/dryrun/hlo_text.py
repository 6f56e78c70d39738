"""Parser of HLO text into computations and instructions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b(pred|bf16|[fcsu]\d+)(?:e\w+)?\[([\d,]*)\]")
_OPENING = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.-]+)|branch_computations=\{(.*?)\}"
)


class Instruction(NamedTuple):
    """One line of HLO. `shape` is the text of an array's or a tuple's shape; `rest` is the text after the operands."""

    name: str
    shape: str
    opcode: str
    operands: str
    rest: str

    @property
    def called(self) -> Iterator[str]:
        """Names of the computations that it runs."""
        for name, names in _CALLED.findall(self.rest):
            yield from [name] if name else re.findall(r"[\w.-]+", names)

    def operand_shapes(self, body: Computation) -> list[str]:
        """Shapes of its operands, as text."""
        return [body[name].shape for name in re.findall(r"%([\w.-]+)", self.operands)]


Computation = dict[str, Instruction]


def parsed(text: str) -> tuple[dict[str, Computation], str]:
    """Parse the instructions of each computation, by name, and the name of the entry.

    Raises:
        ValueError: the text is not HLO.
    """
    computations, entry, current = {}, "", {}
    for line in text.splitlines():
        if opening := _OPENING.match(line):
            current = computations[opening[2]] = {}
            entry = opening[2] if opening[1] else entry
        elif match := _LINE.match(line):
            current[match[1]] = _instruction(match[1], re.sub(r"/\*.*?\*/", "", match[2]))
    if not entry:
        raise ValueError("The HLO text has no ENTRY: pass what compiled.as_text() returned.")
    return computations, entry


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    start = text.index("(", end)
    stop = _closing(text, start)
    return Instruction(name, text[:end], text[end:start].strip(), text[start + 1 : stop], text[stop + 1 :])


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"HLO line without its closing parenthesis: {text[:80]}")


def array_bytes(shape: str) -> int:
    """Bytes of an array or a tuple of arrays, without padding of layouts."""
    return sum(math.prod(_numbers(sizes)) * _bits(dtype) for dtype, sizes in _ARRAY.findall(shape)) // 8


def dtype_of(shape: str) -> str:
    """HLO's dtype of the first array, as in "bf16"."""
    return _ARRAY.search(shape)[1]


def sizes_of(shape: str) -> list[int]:
    """Sizes of the first array."""
    return _numbers(_ARRAY.search(shape)[2])


def _numbers(sizes: str) -> list[int]:
    return [int(size) for size in sizes.split(",")] if sizes else []


def _bits(dtype: str) -> int:
    return _BITS.get(dtype) or int(re.sub(r"\D", "", dtype))
