"""The parts that our arrays are of tensors on disk which hold several of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class TensorSlice(Protocol):
    """The place of one of our arrays in a tensor on disk that holds several."""

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole tensor."""

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """Our numbers in our order, as a view of the tensor's memory; axes may be split."""

    def rows(self, array: Any) -> Any:
        """Our rows of an array of NumPy or JAX with one row for each output of the whole matrix."""


@dataclass(frozen=True)
class Rows:
    """`count` rows from `start` on of a tensor with `total`; `transposed`: it is stored as (in, out)."""

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
class ExpertRows(Rows):
    """Such rows of each expert's matrix, in a tensor of all experts: `[E, total, in]`, transposed `[E, in, total]`."""

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        return (ours[0], *super().shape(ours[1:]))

    def view(self, tensor: np.ndarray) -> np.ndarray:
        matrices = tensor.swapaxes(1, 2) if self.transposed else tensor
        return matrices[:, self.start : self.start + self.count]


@dataclass(frozen=True)
class OneRow:
    """A vector of ours that is a matrix with one row."""

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        return (1, *ours)

    def view(self, tensor: np.ndarray) -> np.ndarray:
        return tensor[0]

    def rows(self, array: Any) -> Any:
        return array[0]


@dataclass(frozen=True)
class PerHead:
    """Query, key or value (`which` is 0, 1 or 2) of a tensor that holds the three of each head together."""

    which: int
    heads: int

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        return (3 * ours[0], *ours[1:])

    def view(self, tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(self.heads, 3, -1, *tensor.shape[1:])[:, self.which]

    def rows(self, array: Any) -> Any:
        return self.view(array).reshape(-1, *array.shape[1:])


@dataclass(frozen=True)
class ExpertColumns:
    """Every `step`-th column from `start` on of all experts' matrices, stored as `[E, in, out]`, or biases `[E, out]`.

    Ours are `[E, out, in]` and `[E, out]`.
    """

    start: int = 0
    step: int = 1

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        experts, outputs, *inputs = ours
        return (experts, *inputs, outputs * self.step)

    def view(self, tensor: np.ndarray) -> np.ndarray:
        columns = tensor[..., self.start :: self.step]
        return columns.swapaxes(1, 2) if tensor.ndim == 3 else columns

    def rows(self, array: Any) -> Any:
        return array[self.start :: self.step]


@dataclass(frozen=True)
class PartOfEach:
    """Of a tensor with as many rows for each of `groups`, `total`, the `count` from `start` on of every one."""

    groups: int
    start: int
    count: int
    total: int

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        return (self.groups * self.total, *ours[1:])

    def view(self, tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(self.groups, self.total, *tensor.shape[1:])[:, self.start : self.start + self.count]

    def rows(self, array: Any) -> Any:
        return self.view(array).reshape(-1, *array.shape[1:])


def interleaved(module: str, groups: int, sizes: dict[str, int]) -> dict[str, tuple[str, TensorSlice]]:
    """Names for a module whose weight has for each of `groups` the rows of several of ours, `sizes` (our module -> its
    rows of one group), one below the other."""
    total, names, start = sum(sizes.values()), {}, 0
    for ours, count in sizes.items():
        names[ours] = (module, PartOfEach(groups, start, count, total))
        start += count
    return names


def concatenated(module: str, sizes: dict[str, int], *, transposed: bool = False) -> dict[str, tuple[str, TensorSlice]]:
    """Names for a module whose weight joins several of ours, `sizes` (our module -> rows), one below the other."""
    total, names, start = sum(sizes.values()), {}, 0
    for ours, count in sizes.items():
        names[ours] = (module, Rows(start, count, total, transposed))
        start += count
    return names
