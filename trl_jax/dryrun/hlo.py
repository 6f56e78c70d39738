"""FLOPs of matrix products and bytes of collectives on each device, counted in a compiled program's HLO text.

XLA's own cost analysis counts the body of a loop once; here each is counted as often as it runs.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from trl_jax.dryrun.hlo_flops import convolution_flops, dot_flops
from trl_jax.dryrun.hlo_text import Computation, Instruction, array_bytes, dtype_of, parsed

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
_PRODUCTS = {"dot": dot_flops, "convolution": convolution_flops}
_CALLS = ("while", "fusion", "call", "conditional", "async")


class Collective(NamedTuple):
    """Collectives of one kind among groups of one size, on arrays of one dtype.

    count: how often a step runs them. bytes: the larger of operands and results, summed over all `count`; for an
    all-gather that is the gathered array. sent: bytes that each device sends in a ring (Patarasuk and Yuan 2009).
    """

    kind: str
    group: int
    dtype: str
    count: int
    bytes: int
    sent: int


class Cost(NamedTuple):
    """Of one device: FLOPs of matrix products, its collectives, and the number of loops of unknown length, whose bodies
    are counted once."""

    flops: int
    collectives: list[Collective]
    unknown: int


def cost(text: str) -> Cost:
    """Count the cost of a program from its HLO text, as `compiled.as_text()` gives it.

    Raises:
        ValueError: the text is not HLO, or has replica groups in an unknown notation.
    """
    computations, entry = parsed(text)
    devices = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
    reader = _Reader(computations, int(devices[1]) if devices else 1)
    reader.visit(entry, 1)
    found = [Collective(*key, *sums) for key, sums in sorted(reader.collectives.items())]
    return Cost(reader.flops, found, reader.unknown)


class _Reader:
    """Walks from the entry into the computations it calls, with how often each runs."""

    def __init__(self, computations: dict[str, Computation], devices: int):
        self.computations, self.devices, self.flops, self.unknown = computations, devices, 0, 0
        self.collectives: dict[tuple[str, int, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        self._chains: set[str] = set()

    def visit(self, name: str, times: int) -> None:
        body = self.computations[name]
        for one in body.values():
            kind = one.opcode.removesuffix("-start")
            if kind in _PRODUCTS:
                self.flops += times * _PRODUCTS[kind](one, body)
            elif kind in COLLECTIVES:
                self._collect(kind, one, body, times)
            elif kind in _CALLS:
                trips = self._trip_count(one) if kind == "while" else 1
                for called in one.called:
                    self.visit(called, times * trips)

    def _collect(self, kind: str, one: Instruction, body: Computation, times: int) -> None:
        if chain := re.search(r'chain_id="(\d+)"', one.rest):  # one collective of a TPU, split over several fusions
            if chain[1] in self._chains:
                return
            self._chains.add(chain[1])
        operands = sum(array_bytes(shape) for shape in one.operand_shapes(body))
        asynchronous = one.opcode.endswith("-start") and one.shape.startswith("(")  # its result has the operands, too
        results = array_bytes(one.shape) - (operands if asynchronous else 0)
        size, group = max(operands, results), _group(one, self.devices)
        share = 1.0 if "permute" in kind or "broadcast" in kind else (group - 1) / group
        sums = self.collectives[kind, group, dtype_of(one.shape)]
        for place, added in enumerate((1, size, int(size * share * (2 if kind == "all-reduce" else 1)))):
            sums[place] += times * added

    def _trip_count(self, one: Instruction) -> int:
        """Trip count of a loop: the compiler's, or the constant that its counter is compared with."""
        if known := re.search(r'known_trip_count":\{"n":"(\d+)"', one.rest):
            return int(known[1])
        condition = self.computations[re.search(r"condition=%?([\w.-]+)", one.rest)[1]].values()
        limits = [i for i in condition if i.opcode == "constant" and i.shape.startswith(("s32[]", "u32[]"))]
        if len(limits) != 1 or not any("direction=LT" in rest for rest in self._rests(condition)):
            self.unknown += 1
            return 1
        return int(limits[0].operands)

    def _rests(self, instructions: Iterable[Instruction]) -> Iterator[str]:
        for one in instructions:
            yield one.rest
            for called in one.called:
                yield from self._rests(self.computations[called].values())


def _group(one: Instruction, devices: int) -> int:
    """Size of a replica group. XLA lists the devices, gives their number, or names axes of a mesh; {} is all of
    them."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", one.rest):
        return listed[1].count(",") + 1
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", one.rest):
        return int(counted[1])
    if named := re.search(r"replica_groups=mesh\[(.*?)\].*? \{('.*?')\}", one.rest):  # device_ids may come between
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    if "source_target_pairs" in one.rest:
        return 2
    if "replica_groups={}" in one.rest:
        return devices
    raise ValueError(f"{one.opcode} {one.name}: its replica groups are written in a new way: {one.rest[:200]}")
