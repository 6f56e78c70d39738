"""Count the FLOPs of matrix products and the bytes of collectives, per device, in compiled HLO text."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

# FLOPs of one instruction: two per multiply-add


def dot_flops(op: Instruction, body: Computation) -> int:
    """FLOPs of a `dot`."""
    left = sizes_of(op.operand_shapes(body)[0])
    axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.rest)[1]
    return 2 * math.prod(sizes_of(op.shape)) * math.prod(left[int(axis)] for axis in axes.split(",") if axis)


def convolution_flops(op: Instruction, body: Computation) -> int:
    """FLOPs of a `convolution`. TPUs use it for matrix products, with batch or contracted axes as spatial axes."""
    left, right = (sizes_of(shape) for shape in op.operand_shapes(body)[:2])
    left_labels, right_labels, out_labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.rest).groups()
    out, window = sizes_of(op.shape), _window(op.rest)
    flops = 2 * out[out_labels.index("b")] * out[out_labels.index("f")] * right[right_labels.index("i")]
    for axis in range(len(out_labels) - 2):
        shapes = ((left, left_labels), (right, right_labels), (out, out_labels))
        sizes = [shape[labels.index(str(axis))] for shape, labels in shapes]
        flops *= _num_products(*sizes, *window(axis))
    return flops


def _window(rest: str) -> Callable[[int], tuple[int, int, int, int]]:
    """A function: spatial axis -> (stride, low padding, left dilation, right dilation)."""
    text = re.search(r"window=\{(.*?)\}", rest)
    fields = dict(part.split("=") for part in text[1].split()) if text else {}

    def window_of_axis(axis: int) -> tuple[int, int, int, int]:
        def value(key: str, default: str) -> int:
            return int(fields[key].split("x")[axis].split("_")[0]) if key in fields else int(default)

        return value("stride", "1"), value("pad", "0"), value("lhs_dilate", "1"), value("rhs_dilate", "1")

    return window_of_axis


def _num_products(
    left: int, right: int, out: int, stride: int, pad: int, left_dilation: int, right_dilation: int
) -> int:
    """Number of products along one spatial axis, without padding and the gaps of dilation."""
    last = (left - 1) * left_dilation
    positions = (o * stride + r * right_dilation - pad for o in range(out) for r in range(right))
    return sum(0 <= position <= last and position % left_dilation == 0 for position in positions)


# Parser

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b(pred|bf16|[fcsu]\d+)(?:e\w+)?\[([\d,]*)\]")
_OPENING = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.-]+)|branch_computations=\{(.*?)\}"
)


class Instruction(NamedTuple):
    """One line of HLO. shape: text of the shape of an array or a tuple. rest: the text after the operands."""

    name: str
    shape: str
    opcode: str
    operands: str
    rest: str

    @property
    def called(self) -> Iterator[str]:
        """Names of the computations that it calls."""
        for name, names in _CALLED.findall(self.rest):
            yield from [name] if name else re.findall(r"[\w.-]+", names)

    def operand_shapes(self, body: Computation) -> list[str]:
        """Shapes of its operands, as text."""
        return [body[name].shape for name in re.findall(r"%([\w.-]+)", self.operands)]


Computation = dict[str, Instruction]


def parse_hlo(text: str) -> tuple[dict[str, Computation], str]:
    """Parse HLO text: computation -> its instructions by name; and the name of the entry computation.

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
        raise ValueError("The HLO text has no ENTRY: pass the result of compiled.as_text().")
    return computations, entry


def _instruction(name: str, text: str) -> Instruction:
    end = _closing_parenthesis(text, 0) + 1 if text.startswith("(") else text.index(" ")
    start = text.index("(", end)
    stop = _closing_parenthesis(text, start)
    return Instruction(name, text[:end], text[end:start].strip(), text[start + 1 : stop], text[stop + 1 :])


def _closing_parenthesis(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"HLO line without a closing parenthesis: {text[:80]}")


def array_bytes(shape: str) -> int:
    """Bytes of an array or a tuple of arrays, without padding."""
    return sum(math.prod(_numbers(sizes)) * _bits(dtype) for dtype, sizes in _ARRAY.findall(shape)) // 8


def dtype_of(shape: str) -> str:
    """HLO's dtype of the first array, such as "bf16"."""
    return _ARRAY.search(shape)[1]


def sizes_of(shape: str) -> list[int]:
    """Sizes of the first array."""
    return _numbers(_ARRAY.search(shape)[2])


def _numbers(sizes: str) -> list[int]:
    return [int(size) for size in sizes.split(",")] if sizes else []


def _bits(dtype: str) -> int:
    return _BITS.get(dtype) or int(re.sub(r"\D", "", dtype))


# Cost of a program

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
_PRODUCTS = {"dot": dot_flops, "convolution": convolution_flops}
_CALLS = ("while", "fusion", "call", "conditional", "async")


class Collective(NamedTuple):
    """Collectives of one kind among groups of one size, on arrays of one dtype.

    count: how often a step runs them.
    bytes: the larger of operands and results, summed over all `count`; for an all-gather, the gathered array.
    sent: bytes that each device sends in a ring (Patarasuk and Yuan 2009).
    """

    kind: str
    group: int
    dtype: str
    count: int
    bytes: int
    sent: int


class Cost(NamedTuple):
    """Cost per device. unknown: number of loops with an unknown trip count, whose bodies are counted once."""

    flops: int
    collectives: list[Collective]
    unknown: int


def cost(text: str) -> Cost:
    """Count the cost of a program, given the result of `compiled.as_text()`.

    Raises:
        ValueError: the text is not HLO, or has replica groups in an unknown notation.
    """
    computations, entry = parse_hlo(text)
    devices = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
    reader = _Reader(computations, int(devices[1]) if devices else 1)
    reader.visit(entry, 1)
    collectives = [Collective(*key, *sums) for key, sums in sorted(reader.collectives.items())]
    return Cost(reader.flops, collectives, reader.unknown)


class _Reader:
    """Visits the computations called from the entry, and tracks how often each runs."""

    def __init__(self, computations: dict[str, Computation], devices: int):
        self.computations, self.devices, self.flops, self.unknown = computations, devices, 0, 0
        self.collectives: dict[tuple[str, int, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        self._chains: set[str] = set()

    def visit(self, name: str, count: int) -> None:
        body = self.computations[name]
        for op in body.values():
            kind = op.opcode.removesuffix("-start")
            if kind in _PRODUCTS:
                self.flops += count * _PRODUCTS[kind](op, body)
            elif kind in COLLECTIVES:
                self._collect(kind, op, body, count)
            elif kind in _CALLS:
                trips = self._trip_count(op) if kind == "while" else 1
                for called in op.called:
                    self.visit(called, count * trips)

    def _collect(self, kind: str, op: Instruction, body: Computation, count: int) -> None:
        # The TPU compiler splits one collective over several fusions, which share a chain_id.
        if chain := re.search(r'chain_id="(\d+)"', op.rest):
            if chain[1] in self._chains:
                return
            self._chains.add(chain[1])
        operands = sum(array_bytes(shape) for shape in op.operand_shapes(body))
        asynchronous = op.opcode.endswith("-start") and op.shape.startswith("(")  # its result includes the operands
        results = array_bytes(op.shape) - (operands if asynchronous else 0)
        size, group = max(operands, results), _group(op, self.devices)
        share = 1.0 if "permute" in kind or "broadcast" in kind else (group - 1) / group
        sums = self.collectives[kind, group, dtype_of(op.shape)]
        for index, amount in enumerate((1, size, int(size * share * (2 if kind == "all-reduce" else 1)))):
            sums[index] += count * amount

    def _trip_count(self, op: Instruction) -> int:
        """Trip count of a loop: from the compiler's annotation, or the constant to which the counter is compared."""
        if annotation := re.search(r'known_trip_count":\{"n":"(\d+)"', op.rest):
            return int(annotation[1])
        condition = self.computations[re.search(r"condition=%?([\w.-]+)", op.rest)[1]].values()
        limits = [i for i in condition if i.opcode == "constant" and i.shape.startswith(("s32[]", "u32[]"))]
        if len(limits) != 1 or not any("direction=LT" in rest for rest in self._attribute_texts(condition)):
            self.unknown += 1
            return 1
        return int(limits[0].operands)

    def _attribute_texts(self, instructions: Iterable[Instruction]) -> Iterator[str]:
        for op in instructions:
            yield op.rest
            for called in op.called:
                yield from self._attribute_texts(self.computations[called].values())


def _group(op: Instruction, devices: int) -> int:
    """Size of a replica group. XLA lists devices, gives their number, or names mesh axes; {} means all devices."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", op.rest):
        return listed[1].count(",") + 1
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", op.rest):
        return int(counted[1])
    if named := re.search(r"replica_groups=mesh\[(.*?)\].*? \{('.*?')\}", op.rest):  # device_ids may come between
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    if "source_target_pairs" in op.rest:
        return 2
    if "replica_groups={}" in op.rest:
        return devices
    raise ValueError(f"{op.opcode} {op.name}: unknown notation of replica groups: {op.rest[:200]}")
