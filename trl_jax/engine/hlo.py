"""What a compiled program does on each device, read from its HLO text: matrix products, and words with other devices.

XLA's own cost analysis counts the body of a loop once; here it counts as often as it runs.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b(pred|bf16|[fcsu]\d+)(?:e\w+)?\[([\d,]*)\]")
_OPENING = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.-]+)|branch_computations=\{(.*?)\}"
)


class Instruction(NamedTuple):
    """`shape` is text, of one array or a tuple; `rest` is what stands behind the operands."""

    name: str
    shape: str
    opcode: str
    operands: str
    rest: str


class Collective(NamedTuple):
    """Collectives of one kind between as many devices on arrays of one dtype.

    count: how often a step does it. bytes: what lies in its larger end, over all `count`; of an all-gather the gathered
    whole. sent: what each device sends of it where they stand in a ring (Patarasuk and Yuan 2009).
    """

    kind: str
    group: int
    dtype: str
    count: int
    bytes: int
    sent: int


class Cost(NamedTuple):
    """flops: of matrix products, on each device. unknown: loops of which the text does not say how often they run,
    their bodies counted once."""

    flops: int
    collectives: list[Collective]
    unknown: int


def cost(text: str) -> Cost:
    """Of the program with this HLO text, as `compiled.as_text()` gives it."""
    computations, entry = _parsed(text)
    devices = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
    reader = _Reader(computations, int(devices[1]) if devices else 1)
    reader.visit(entry, 1)
    found = [Collective(*key, *sums) for key, sums in sorted(reader.collectives.items())]
    return Cost(reader.flops, found, reader.unknown)


def array_bytes(shape: str) -> int:
    """Of an array or a tuple of them, without what a layout pads."""
    return sum(_elements(sizes) * _bits(dtype) for dtype, sizes in _ARRAY.findall(shape)) // 8


def _bits(dtype: str) -> int:
    return _BITS.get(dtype) or int(re.sub(r"\D", "", dtype))


def _elements(sizes: str) -> int:
    return math.prod(map(int, sizes.split(","))) if sizes else 1


def _parsed(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """The instructions of each computation by name, and the name of the entry."""
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
    """Where the parenthesis at `start` is closed."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"HLO line without its closing parenthesis: {text[:80]}")


class _Reader:
    """Walks from the entry into what it calls, with how often each is run."""

    def __init__(self, computations: dict[str, dict[str, Instruction]], devices: int):
        self.computations, self.devices, self.flops, self.unknown = computations, devices, 0, 0
        self.collectives: dict[tuple[str, int, str], list[int]] = defaultdict(lambda: [0, 0, 0])

    def visit(self, name: str, times: int) -> None:
        body = self.computations[name]
        for one in body.values():
            kind = one.opcode.removesuffix("-start")
            if kind in ("dot", "convolution"):
                self.flops += times * (_dot if kind == "dot" else _convolution)(one, body)
            elif kind in COLLECTIVES:
                self._collect(kind, one, body, times)
            elif kind in ("while", "fusion", "call", "conditional", "async"):
                turns = self._turns(one) if kind == "while" else 1
                for called in _called(one):
                    self.visit(called, times * turns)

    def _collect(self, kind: str, one: Instruction, body: dict[str, Instruction], times: int) -> None:
        operands = sum(array_bytes(shape) for shape in _shapes(one, body))
        results = array_bytes(one.shape) - (operands if one.opcode.endswith("-start") and one.shape[0] == "(" else 0)
        size, group = max(operands, results), _group(one, self.devices)
        share = 1.0 if "permute" in kind or "broadcast" in kind else (group - 1) / group
        sums = self.collectives[kind, group, _ARRAY.search(one.shape)[1]]
        for place, added in enumerate((1, size, int(size * share * (2 if kind == "all-reduce" else 1)))):
            sums[place] += times * added

    def _turns(self, one: Instruction) -> int:
        """How often a loop runs: as the compiler says, or the constant that its counter is compared with."""
        if told := re.search(r'known_trip_count":\{"n":"(\d+)"', one.rest):
            return int(told[1])
        condition = self.computations[re.search(r"condition=%?([\w.-]+)", one.rest)[1]].values()
        limits = [i for i in condition if i.opcode == "constant" and i.shape.startswith(("s32[]", "u32[]"))]
        if len(limits) != 1 or not any("direction=LT" in rest for rest in self._rests(condition)):
            self.unknown += 1
            return 1
        return int(limits[0].operands)

    def _rests(self, instructions: Iterable[Instruction]) -> Iterator[str]:
        for one in instructions:
            yield one.rest
            for called in _called(one):
                yield from self._rests(self.computations[called].values())


def _called(one: Instruction) -> Iterator[str]:
    for name, names in _CALLED.findall(one.rest):
        yield from [name] if name else re.findall(r"[\w.-]+", names)


def _shapes(one: Instruction, body: dict[str, Instruction]) -> list[str]:
    """Of the operands."""
    return [body[name].shape for name in re.findall(r"%([\w.-]+)", one.operands)]


def _sizes(shape: str) -> list[int]:
    found = _ARRAY.search(shape)[2]
    return [int(size) for size in found.split(",")] if found else []


def _group(one: Instruction, devices: int) -> int:
    """How many devices take part together. XLA lists them, counts them, or names axes of a mesh; {} are all."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", one.rest):
        return listed[1].count(",") + 1
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", one.rest):
        return int(counted[1])
    if named := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", one.rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    if "source_target_pairs" in one.rest:
        return 2
    if "replica_groups={}" in one.rest:
        return devices
    raise ValueError(f"{one.opcode} {one.name}: its replica groups are written in a new way: {one.rest[:200]}")


def _dot(one: Instruction, body: dict[str, Instruction]) -> int:
    left = _sizes(_shapes(one, body)[0])
    summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)[1]
    return 2 * math.prod(_sizes(one.shape)) * math.prod(left[int(axis)] for axis in summed.split(",") if axis)


def _convolution(one: Instruction, body: dict[str, Instruction]) -> int:
    """TPUs compute products as convolutions, whose spatial axes stand for axes that are summed or only run along."""
    left, right = (_sizes(shape) for shape in _shapes(one, body)[:2])
    of_left, of_right, of_out = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.rest).groups()
    out, window = _sizes(one.shape), _window(one.rest)
    flops = 2 * out[of_out.index("b")] * out[of_out.index("f")] * right[of_right.index("i")]
    for axis in range(len(of_out) - 2):
        sizes = [side[labels.index(str(axis))] for side, labels in ((left, of_left), (right, of_right), (out, of_out))]
        flops *= _meetings(*sizes, *window(axis))
    return flops


def _window(rest: str):
    """From a spatial axis to its stride, pad before, and dilations of left and right."""
    text = re.search(r"window=\{(.*?)\}", rest)
    given = dict(part.split("=") for part in text[1].split()) if text else {}

    def of_axis(axis: int) -> tuple[int, int, int, int]:
        def value(key: str, default: str) -> int:
            return int(given[key].split("x")[axis].split("_")[0]) if key in given else int(default)

        return value("stride", "1"), value("pad", "0"), value("lhs_dilate", "1"), value("rhs_dilate", "1")

    return of_axis


def _meetings(left: int, right: int, out: int, stride: int, pad: int, left_dilation: int, right_dilation: int) -> int:
    """How many pairs of places of both sides are multiplied along one spatial axis: pads and gaps are not."""
    last = (left - 1) * left_dilation
    places = (o * stride + r * right_dilation - pad for o in range(out) for r in range(right))
    return sum(0 <= place <= last and place % left_dilation == 0 for place in places)
