"""The two-way table between our arrays and the tensors on disk; loading and saving walk the same list.

A family says how its modules are called. `{}` in a name stands for the number of the layer, a second one for that of
the expert: the array then has a leading axis for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_jax.hub.checkpoint.tensor_slices import TensorSlice

# Our module (or parameter) -> theirs; beside it the slice that is ours, if it is not all of it, and the number of the
# layer there that is our first, if it is not 0. Norms aside, in the order in which transformers makes the modules: that
# is the order in which adapters are drawn.
Names = dict[str, str | tuple[str, TensorSlice] | tuple[str, int] | tuple[str, TensorSlice, int]]


def in_runs(runs: Iterable[Any], names_of: Callable[[Any], Names]) -> Names:
    """The names of a model whose layers are of several kinds, from those of a model whose layers are all of one.

    Args:
        runs: each a `models.arch.Run`.
        names_of: from a `models.arch.LayerKind`.
    """
    return {ours: name for run in runs for ours, name in _of_run(names_of(run.kind), run).items()}


def _of_run(names: Names, run: Any) -> Names:
    found: Names = {}
    for ours, name in names.items():
        if ".layers." not in ours:
            found[ours] = name
            continue
        tensor, *place = (name,) if isinstance(name, str) else name
        found[ours.replace(".layers.", f".{run.name}.", 1)] = (tensor, *place, run.first) if run.first else name
    return found


def ordered(names: Names, *modules: str, before: str) -> Names:
    """The same names with these modules of ours moved in front of another."""
    moved = {module: names[module] for module in modules}
    rest = {module: name for module, name in names.items() if module not in moved}
    at = list(rest).index(before)
    return dict([*list(rest.items())[:at], *moved.items(), *list(rest.items())[at:]])


@dataclass(frozen=True)
class TensorEntry:
    """Our array at `path` and their `tensor`, or its slice that is ours; `first` is the number of the first layer."""

    path: str
    tensor: str
    tensor_slice: TensorSlice | None = None
    first: int = 0

    @property
    def stacked(self) -> int:
        """The number of leading axes that count tensors."""
        return self.tensor.count("{}")

    def tensors(self, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
        """Each tensor and its index in our array of this shape."""
        places = np.ndindex(shape[: self.stacked])
        return [(self.tensor.format(*(i + self.first for i in index[:1]), *index[1:]), index) for index in places]

    def shape_on_disk(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        ours = shape[self.stacked :]
        return ours if self.tensor_slice is None else self.tensor_slice.shape(ours)

    def take(self, tensor: np.ndarray) -> np.ndarray:
        """Our array, or one layer of it, from the tensor."""
        if self.tensor_slice is None:
            return tensor
        ours = self.tensor_slice.view(tensor)
        if ours.ndim < tensor.ndim:
            return ours
        return ours.reshape(-1, *ours.shape[ours.ndim - tensor.ndim + 1 :])

    def put(self, values: np.ndarray, tensor: np.ndarray) -> None:
        """Write our array, or one layer of it, to its place in the tensor."""
        view = tensor if self.tensor_slice is None else self.tensor_slice.view(tensor)
        view[...] = values.reshape(view.shape)


def make_tensor_map(paths: Iterable[str], names: Names) -> list[TensorEntry]:
    """An entry for each of our parameters, by its own name in `names` or by its module's and `.weight` or `.bias`."""
    tensor_map = []
    for path in paths:
        module, _, kind = path.rpartition(".")
        name, suffix = (names[path], "") if path in names else (names[module], f".{kind}")
        tensor, *place = (name,) if isinstance(name, str) else name
        first = place.pop() if place and isinstance(place[-1], int) else 0
        tensor_map.append(TensorEntry(path, tensor + suffix, place[0] if place else None, first))
    return tensor_map
