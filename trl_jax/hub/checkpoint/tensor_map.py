"""The two-way table between our arrays and the tensors on disk; loading and saving walk the same list.

A family says how its modules are called. `{}` in a name stands for the number of the layer, a second one for that of
the expert: the array then has a leading axis for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class Part(Protocol):
    """Where in a tensor on disk one of our arrays lies."""

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole tensor."""

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """Our numbers in our order, sharing the tensor's memory; axes may be split."""

    def rows(self, array: Any) -> Any:
        """Ours of an array that has one row for each of the matrix's outputs, of NumPy's or JAX's."""


@dataclass(frozen=True)
class Rows:
    """`count` rows from `start` on of a tensor with `total`; `transposed`: it lies as (in, out)."""

    start: int
    count: int
    total: int
    transposed: bool = False

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        whole = (self.total, *ours[1:])
        return whole[::-1] if self.transposed else whole

    def view(self, tensor: np.ndarray) -> np.ndarray:
        rows = tensor.T if self.transposed else tensor
        return self.rows(rows)

    def rows(self, array: Any) -> Any:
        return array[self.start : self.start + self.count]


@dataclass(frozen=True)
class PerHead:
    """Query, key or value (0, 1, 2) of a tensor that holds the three of each head together."""

    which: int
    heads: int

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        return (3 * ours[0], *ours[1:])

    def view(self, tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(self.heads, 3, -1, *tensor.shape[1:])[:, self.which]

    def rows(self, array: Any) -> Any:
        return self.view(array).reshape(-1, *array.shape[1:])


def concatenated(module: str, sizes: dict[str, int], *, transposed: bool = False) -> dict[str, tuple[str, Part]]:
    """Names for a module whose weight joins several of ours, `sizes` (our module -> rows), one below the other."""
    total, names, start = sum(sizes.values()), {}, 0
    for ours, count in sizes.items():
        names[ours] = (module, Rows(start, count, total, transposed))
        start += count
    return names


# In the order in which transformers makes the modules, norms aside: so adapters are drawn.
# Our module (or parameter) -> theirs; with it where in it ours lies unless it is all of it, or the number of the layer
# that is our first unless it is theirs.
Names = dict[str, str | tuple[str, Part] | tuple[str, int]]


def ordered(names: Names, *modules: str, before: str) -> Names:
    """The same names with these modules of ours put in front of another."""
    moved = {module: names[module] for module in modules}
    rest = {module: name for module, name in names.items() if module not in moved}
    at = list(rest).index(before)
    return dict([*list(rest.items())[:at], *moved.items(), *list(rest.items())[at:]])


@dataclass(frozen=True)
class TensorEntry:
    """Our array at `path` and their `tensor`, or the part of it that is ours; `first` is where layers begin."""

    path: str
    tensor: str
    part: Part | None = None
    first: int = 0

    @property
    def stacked(self) -> int:
        """How many leading axes count tensors."""
        return self.tensor.count("{}")

    def tensors(self, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
        """Each tensor and its index in our array of this shape."""
        places = np.ndindex(shape[: self.stacked])
        return [(self.tensor.format(*(i + self.first for i in index)), index) for index in places]

    def shape_on_disk(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        ours = shape[self.stacked :]
        return ours if self.part is None else self.part.shape(ours)

    def take(self, tensor: np.ndarray) -> np.ndarray:
        """Our array, or one slice of it, from the tensor."""
        if self.part is None:
            return tensor
        ours = self.part.view(tensor)
        return ours.reshape(-1, *ours.shape[ours.ndim - tensor.ndim + 1 :])

    def put(self, values: np.ndarray, tensor: np.ndarray) -> None:
        """Write our array, or one slice of it, to its place in the tensor."""
        view = tensor if self.part is None else self.part.view(tensor)
        view[...] = values.reshape(view.shape)


def make_tensor_map(paths: Iterable[str], names: Names) -> list[TensorEntry]:
    """A wire for each of our parameters: its own entry in `names`, or its module's with .weight or .bias after it."""
    tensor_map = []
    for path in paths:
        module, _, kind = path.rpartition(".")
        name, suffix = (names[path], "") if path in names else (names[module], f".{kind}")
        tensor, where = (name, None) if isinstance(name, str) else name
        part, first = (None, where) if isinstance(where, int) else (where, 0)
        tensor_map.append(TensorEntry(path, tensor + suffix, part, first))
    return tensor_map
