"""Map tensors of a checkpoint to arrays of the model: names, fused tensors, per-head slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

# Slices: where our arrays are located inside fused tensors on disk


class TensorSlice(Protocol):
    """The location of one of our arrays in a fused tensor on disk."""

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the fused tensor, given the shape of our array."""

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """A view of our part of the tensor, in our order; its leading axes may not be merged yet."""

    def rows(self, array: Any) -> Any:
        """Our rows of a NumPy or JAX array that has one row per output of the fused matrix."""


@dataclass(frozen=True)
class Rows:
    """`count` rows starting at `start` of a tensor with `total` rows; `transposed` if it is stored as (in, out)."""

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
    """Like `Rows` for each expert's matrix in a tensor of all experts: `[E, total, in]`, transposed `[E, in,
    total]`."""

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        return (ours[0], *super().shape(ours[1:]))

    def view(self, tensor: np.ndarray) -> np.ndarray:
        matrices = tensor.swapaxes(1, 2) if self.transposed else tensor
        return matrices[:, self.start : self.start + self.count]


@dataclass(frozen=True)
class OneRow:
    """An array with `axes` additional leading axes of size 1 on disk, such as a vector that is stored as one row."""

    axes: int = 1

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        return (1,) * self.axes + ours

    def view(self, tensor: np.ndarray) -> np.ndarray:
        return tensor[(0,) * self.axes]

    def rows(self, array: Any) -> Any:
        return array[(0,) * self.axes]


@dataclass(frozen=True)
class Kernel:
    """A matrix that is stored on disk as a convolution kernel, (out, *kernel)."""

    kernel: tuple[int, ...]

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        return (ours[0], *self.kernel)

    def view(self, tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(len(tensor), -1)

    def rows(self, array: Any) -> Any:
        return array


@dataclass(frozen=True)
class Tables:
    """A matrix whose rows are stored on disk as `count` matrices of equal size, (count, rows / count, in)."""

    count: int

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        return (self.count, ours[0] // self.count, *ours[1:])

    def view(self, tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(-1, *tensor.shape[2:])

    def rows(self, array: Any) -> Any:
        return array


@dataclass(frozen=True)
class PerHead:
    """Query, key or value (`which` is 0, 1 or 2) in a tensor that stores all three for each head."""

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
    """Every `step`-th output of all experts, from `start` on.

    On disk, matrices are `[E, in, out]` and biases `[E, out]`. Our arrays are `[E, out, in]` and `[E, out]`.
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
    """`count` rows starting at `start` in each of `groups` blocks of `total` rows."""

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
    """Names for a fused module whose weight consists of `groups` blocks, each with the rows of several of our modules.
    `sizes` maps our modules to their rows per block, in order."""
    total, names, start = sum(sizes.values()), {}, 0
    for ours, count in sizes.items():
        names[ours] = (module, PartOfEach(groups, start, count, total))
        start += count
    return names


def concatenated(module: str, sizes: dict[str, int], *, transposed: bool = False) -> dict[str, tuple[str, TensorSlice]]:
    """Names for a fused module whose weight stacks several of ours; `sizes` maps our modules to their rows, in
    order."""
    total, names, start = sum(sizes.values()), {}, 0
    for ours, count in sizes.items():
        names[ours] = (module, Rows(start, count, total, transposed))
        start += count
    return names


# The mapping between our arrays and the tensors on disk, used for both loading and saving


# Our module (or parameter) -> its name on disk, optionally with our slice of that tensor and the number of the first
# layer. Entries are in the order in which transformers registers the modules: adapters are initialized in that order,
# and `named_parameters` lists it. A module's own parameters always precede its children's.
Names = dict[str, str | tuple[str, TensorSlice] | tuple[str, int] | tuple[str, TensorSlice, int]]


def in_runs(runs: Iterable[Any], names_of: Callable[[Any], Names]) -> Names:
    """The names of a model with several kinds of layers, built from the names of models with a single kind.

    Args:
        runs: `models.arch.Run` objects.
        names_of: names for a `models.arch.LayerKind`.
    """
    return {ours: name for run in runs for ours, name in _of_run(names_of(run.kind), run).items()}


def _of_run(names: Names, run: Any) -> Names:
    run_names: Names = {}
    for ours, name in names.items():
        if ".layers." not in ours:
            run_names[ours] = name
            continue
        tensor, *place = (name,) if isinstance(name, str) else name
        run_names[ours.replace(".layers.", f".{run.name}.", 1)] = (tensor, *place, run.first) if run.first else name
    return run_names


def ordered(names: Names, *modules: str, before: str | None = None) -> Names:
    """The same names, with some of our modules moved in front of module `before`, or to the end."""
    moved = {module: names[module] for module in modules}
    rest = {module: name for module, name in names.items() if module not in moved}
    at = len(rest) if before is None else list(rest).index(before)
    return dict([*list(rest.items())[:at], *moved.items(), *list(rest.items())[at:]])


@dataclass(frozen=True)
class TensorEntry:
    """Maps our array at `path` to `tensor` on disk, or to a slice of it; `first` is the number of the first layer."""

    path: str
    tensor: str
    tensor_slice: TensorSlice | None = None
    first: int = 0

    @property
    def stacked(self) -> int:
        """The number of leading axes of our array that are stacked tensors on disk."""
        return self.tensor.count("{}")

    def tensors(self, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
        """(name on disk, index into our array) of each tensor, for our array of this shape."""
        places = np.ndindex(shape[: self.stacked])
        return [(self.tensor.format(*(i + self.first for i in index[:1]), *index[1:]), index) for index in places]

    def shape_on_disk(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        ours = shape[self.stacked :]
        return ours if self.tensor_slice is None else self.tensor_slice.shape(ours)

    def take(self, tensor: np.ndarray) -> np.ndarray:
        """Extract our array, or one layer of it, from the tensor."""
        if self.tensor_slice is None:
            return tensor
        ours = self.tensor_slice.view(tensor)
        if ours.ndim < tensor.ndim:
            return ours
        return ours.reshape(-1, *ours.shape[ours.ndim - tensor.ndim + 1 :])

    def put(self, values: np.ndarray, tensor: np.ndarray) -> None:
        """Write our array, or one layer of it, into the tensor."""
        view = tensor if self.tensor_slice is None else self.tensor_slice.view(tensor)
        view[...] = values.reshape(view.shape)


def make_tensor_map(paths: Iterable[str], names: Names) -> list[TensorEntry]:
    """An entry for each parameter, found in `names` by its own name, or by its module's name and `.weight` or
    `.bias`."""
    tensor_map = []
    for path in paths:
        module, _, kind = path.rpartition(".")
        name, suffix = (names[path], "") if path in names else (names[module], f".{kind}")
        tensor, *place = (name,) if isinstance(name, str) else name
        first = place.pop() if place and isinstance(place[-1], int) else 0
        tensor_map.append(TensorEntry(path, tensor + suffix, place[0] if place else None, first))
    return tensor_map


# Experts fused into one 3D tensor, as in transformers' modules

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
# Weight of a single expert -> the fused tensor, and its position if two weights share that tensor.
_FUSED = {
    ".{}.gate_proj.weight": (_GATE_UP, 0),
    ".{}.up_proj.weight": (_GATE_UP, 1),
    ".{}.down_proj.weight": (_DOWN, None),
}


def with_fused_experts(
    tensor_map: list[TensorEntry], shapes: Mapping[str, Any], on_disk: Mapping[str, tuple[int, ...]]
) -> list[TensorEntry]:
    """Adapt the tensor map to checkpoints that store all experts in one tensor, in either orientation. Other maps are
    returned unchanged. The checkpoint is saved in the form it had, as in transformers."""
    if not any(name.endswith(f".experts.{_GATE_UP}") for name in on_disk):
        return tensor_map
    return [_fused(entry, shapes[entry.path].shape, on_disk) for entry in tensor_map]


def _fused(entry: TensorEntry, shape: tuple[int, ...], on_disk: Mapping[str, tuple[int, ...]]) -> TensorEntry:
    ending = next((end for end in _FUSED if entry.tensor.endswith(f".experts{end}")), None)
    if ending is None:
        return entry
    (name, place), (experts, size, inputs) = _FUSED[ending], shape[-3:]
    tensor, total = f"{entry.tensor.removesuffix(ending)}.{name}", size if place is None else 2 * size
    stored = {tuple(form) for tensor, form in on_disk.items() if tensor.endswith(f".experts.{name}")}
    transposed = total != inputs and stored == {(experts, inputs, total)}
    if place is None and not transposed:
        return replace(entry, tensor=tensor, tensor_slice=None)
    rows = ExpertRows((place or 0) * size, size, total, transposed=transposed)
    return replace(entry, tensor=tensor, tensor_slice=rows)
