"""A few numbers in the place of a tensor, close where the tensors are: what is kept of weights that TRL trained.

A tensor of up to 64 elements is kept as it is. Of a larger one there are eight elements, and of each of 24 stretches of
it the sum of its elements with signs before them that a hash draws, over the root of their number. If each element is
off by `gap`, whichever way, so is such a sum on average, and no element is left out. A tensor whose elements
were exchanged, scaled or not trained has other sums.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass

import numpy as np

WHOLE, STRETCHES, ELEMENTS = 64, 24, 8


@dataclass(frozen=True)
class Sketch:
    """The dtype and shape of a tensor, and up to 64 numbers of it."""

    dtype: np.dtype
    shape: tuple[int, ...]
    values: np.ndarray

    def packed(self) -> str:
        """As a word for a JSON file."""
        shape = "x".join(map(str, self.shape))
        return f"{self.dtype.name} {shape} {base64.b64encode(self.values.astype('<f4').tobytes()).decode()}"


def sketch(name: str, tensor: np.ndarray) -> Sketch:
    """`name` settles the signs and which elements are kept."""
    flat = tensor.astype(np.float64).ravel()
    if flat.size <= WHOLE:
        return Sketch(tensor.dtype, tensor.shape, flat)
    drawn = hashlib.shake_256(name.encode()).digest(8 * ELEMENTS + -(-flat.size // 8))
    places = np.frombuffer(drawn[: 8 * ELEMENTS], "<u8") % flat.size
    signs = 1.0 - 2.0 * np.unpackbits(np.frombuffer(drawn[8 * ELEMENTS :], np.uint8))[: flat.size]
    sums = [part.sum() / np.sqrt(part.size) for part in np.array_split(flat * signs, STRETCHES)]
    return Sketch(tensor.dtype, tensor.shape, np.concatenate([flat[places.astype(int)], sums]))


def unpacked(word: str) -> Sketch:
    import ml_dtypes  # noqa: F401  tells NumPy of bfloat16

    dtype, shape, values = word.split(" ")
    shape = tuple(map(int, shape.split("x"))) if shape else ()
    return Sketch(np.dtype(dtype), shape, np.frombuffer(base64.b64decode(values), "<f4").astype(np.float64))


def gap(name: str, mine: np.ndarray, other: np.ndarray | Sketch) -> float:
    """The largest difference of any element from a tensor, or of any number from what was kept of it."""
    if isinstance(other, Sketch):
        return float(np.max(np.abs(sketch(name, mine).values - other.values)))
    return float(np.max(np.abs(mine.astype(np.float64) - other.astype(np.float64))))


def flat(weights: dict[str, np.ndarray | Sketch], like: dict[str, np.ndarray | Sketch]) -> np.ndarray:
    """All tensors' elements in one array, by name; what is kept of them, where that is all that `like` has."""
    parts = []
    for name in sorted(like):
        tensor = weights[name]
        if isinstance(like[name], Sketch):
            tensor = tensor.values if isinstance(tensor, Sketch) else sketch(name, tensor).values
        parts.append(tensor.astype(np.float64).ravel())
    return np.concatenate(parts)
