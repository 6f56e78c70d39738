"""A computation as plain data: what an exported model becomes before anything of JAX touches it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Ref:
    """Stands in the arguments of a node for the value of an earlier one."""

    name: str


@dataclass(frozen=True)
class Node:
    """One operation.

    op: the name of an ATen operation with its overload ("aten.add.Tensor"), or of a function on Python numbers
    ("operator.mul"). dtype: of the result, a tuple of them where it has several; None for Python numbers. layer: the
    call of a numbered submodule it belongs to; nodes of one layer are recomputed together.
    """

    name: str
    op: str
    args: tuple
    kwargs: dict[str, Any]
    dtype: str | tuple[str | None, ...] | None
    layer: str | None

    def reads(self) -> Iterator[str]:
        """The names of the values it is computed from."""
        return _names((self.args, tuple(self.kwargs.values())))


@dataclass(frozen=True)
class Piece:
    """Neighbouring nodes of one layer; `needs` are the values they read from before, `gives` those read after."""

    nodes: tuple[Node, ...]
    layer: str | None
    needs: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """From int32 `[2, R, T]`, token ids above the mask, to scores `[R, 1]`.

    input, output: the names of these values. parameters: value name -> the parameter's name in the model it came
    from; those in `frozen` get no gradient. constants hold arrays by value name.
    """

    nodes: tuple[Node, ...]
    parameters: dict[str, str]
    frozen: frozenset[str]
    constants: dict[str, np.ndarray] = field(repr=False)
    input: str
    output: str

    def pieces(self) -> list[Piece]:
        """The nodes cut where the layer changes."""
        groups = [(layer, tuple(nodes)) for layer, nodes in groupby(self.nodes, lambda node: node.layer)]
        pieces, wanted = [], {self.output}
        for layer, nodes in reversed(groups):
            made = {node.name for node in nodes}
            read = {name for node in nodes for name in node.reads()}
            pieces.append(Piece(nodes, layer, tuple(sorted(read - made)), tuple(sorted(made & wanted))))
            wanted |= read
        return pieces[::-1]

    def unread(self) -> frozenset[str]:
        """The parameters that nothing is computed from, by any of the names that a tied one has here."""
        read = {self.output}.union(*(node.reads() for node in self.nodes))
        used = {name for value, name in self.parameters.items() if value in read}
        return frozenset(self.parameters.values()) - used


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, tuple):
        for entry in value:
            yield from _names(entry)
