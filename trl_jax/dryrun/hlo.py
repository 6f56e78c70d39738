"""What a compiled program does on each device, read from its HLO text: matrix products, and words with other devices.

XLA's own cost analysis counts the body of a loop once; here it counts as often as it runs.
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
    computations, entry = parsed(text)
    devices = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
    reader = _Reader(computations, int(devices[1]) if devices else 1)
    reader.visit(entry, 1)
    found = [Collective(*key, *sums) for key, sums in sorted(reader.collectives.items())]
    return Cost(reader.flops, found, reader.unknown)


class _Reader:
    """Walks from the entry into what it calls, with how often each is run."""

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
                turns = self._turns(one) if kind == "while" else 1
                for called in one.called:
                    self.visit(called, times * turns)

    def _collect(self, kind: str, one: Instruction, body: Computation, times: int) -> None:
        if chain := re.search(r'chain_id="(\d+)"', one.rest):  # a TPU's, spread over several fusions: one all the same
            if chain[1] in self._chains:
                return
            self._chains.add(chain[1])
        operands = sum(array_bytes(shape) for shape in one.given(body))
        begun = one.opcode.endswith("-start") and one.shape.startswith("(")  # its tuple has the operands, too
        results = array_bytes(one.shape) - (operands if begun else 0)
        size, group = max(operands, results), _group(one, self.devices)
        share = 1.0 if "permute" in kind or "broadcast" in kind else (group - 1) / group
        sums = self.collectives[kind, group, dtype_of(one.shape)]
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
            for called in one.called:
                yield from self._rests(self.computations[called].values())


def _group(one: Instruction, devices: int) -> int:
    """How many devices take part together. XLA lists them, counts them, or names axes of a mesh; {} are all."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", one.rest):
        return listed[1].count(",") + 1
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", one.rest):
        return int(counted[1])
    if named := re.search(r"replica_groups=mesh\[(.*?)\].*? \{('.*?')\}", one.rest):  # maybe their order between
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    if "source_target_pairs" in one.rest:
        return 2
    if "replica_groups={}" in one.rest:
        return devices
    raise ValueError(f"{one.opcode} {one.name}: its replica groups are written in a new way: {one.rest[:200]}")
