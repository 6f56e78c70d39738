"""A sketch is a few numbers that represent a tensor; sketches are close if the tensors are. Recordings keep sketches of
the weights that TRL trained.

A tensor of up to 64 elements is kept whole. Of a larger one, a sketch has eight elements, and 24 random projections:
the flattened tensor is cut into 24 parts, and each part's elements are summed with signs drawn from a hash and divided
by the square root of their number. If each element is off by `gap` in any direction, so is such a sum on average, and
every element contributes. If elements were permuted, scaled or not trained, the sums differ.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass

import numpy as np

WHOLE, STRETCHES, ELEMENTS = 64, 24, 8


@dataclass(frozen=True)
class Sketch:
    """The dtype and shape of a tensor, and up to 64 numbers that represent it."""

    dtype: np.dtype
    shape: tuple[int, ...]
    values: np.ndarray

    def packed(self) -> str:
        """As one word, for JSON files."""
        shape = "x".join(map(str, self.shape))
        return f"{self.dtype.name} {shape} {base64.b64encode(self.values.astype('<f4').tobytes()).decode()}"


def sketch(name: str, tensor: np.ndarray) -> Sketch:
    """The sketch of a tensor; `name` seeds the signs and selects the elements."""
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
    """The largest absolute difference from a tensor, or from the numbers of its sketch."""
    if isinstance(other, Sketch):
        return float(np.max(np.abs(sketch(name, mine).values - other.values)))
    return float(np.max(np.abs(mine.astype(np.float64) - other.astype(np.float64))))


def flat(weights: dict[str, np.ndarray | Sketch], like: dict[str, np.ndarray | Sketch]) -> np.ndarray:
    """The elements of all tensors in one array, ordered by name; the numbers of their sketches if `like` has
    sketches."""
    parts = []
    for name in sorted(like):
        tensor = weights[name]
        if isinstance(like[name], Sketch):
            tensor = tensor.values if isinstance(tensor, Sketch) else sketch(name, tensor).values
        parts.append(tensor.astype(np.float64).ravel())
    return np.concatenate(parts)
