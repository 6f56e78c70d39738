"""Float32 sums in the order of torch's kernels for CPUs.

Rewards that are all the same have a mean that is off in its last digit or is not, as the order of the sum has it; the
advantage that is left, of 1e-4, is all that Adam sees where no group has a better one.
"""

from __future__ import annotations

import math

import numpy as np

_LANES = 8  # numbers in a vector
_AT_ONCE, _LEVELS = 4, 4  # partial sums that lie side by side; and those that one goes through


@np.errstate(invalid="ignore")  # of infinite numbers with each other
def torch_sum(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """The sums over an axis, which is left out.

    Args:
        values: float32, contiguous.
        axis: 1 of two or three; None: all values.
    """
    if axis is None:
        return _of_rows(values.reshape(1, -1))[0]
    if axis != 1 or values.ndim not in (2, 3):
        raise ValueError(f"axis={axis} of {values.ndim} axes, wanted 1 of two or three.")
    if values.ndim == 2 or values.shape[2] == 1:
        return _of_rows(values.reshape(values.shape[:2])).reshape(values.shape[:1] + values.shape[2:])
    return np.stack([_of_columns(part) for part in values])


def _of_rows(values: np.ndarray) -> np.ndarray:
    """`[P]` of `[P, n]`, whose rows are contiguous."""
    rows, count = values.shape
    if count < _LANES:
        return _of_row(values.T)
    vectors = count // _LANES
    whole = vectors * _LANES
    partial = _of_row(values[:, :whole].reshape(rows, vectors, _LANES).transpose(1, 0, 2))
    total = np.zeros(rows, np.float32)
    for place in range(whole, count):
        total = total + values[:, place]
    for lane in range(_LANES):
        total = total + partial[:, lane]
    return total


def _of_columns(values: np.ndarray) -> np.ndarray:
    """`[F]` of `[n, F]`, contiguous columns side by side."""
    columns = values.shape[1]
    together = columns - columns % (_AT_ONCE if columns < _LANES else _AT_ONCE * _LANES)
    return np.concatenate([_cascade(values[:, :together]), _of_row(values[:, together:])])


def _of_row(values: np.ndarray) -> np.ndarray:
    """The sum over the first axis, four at once."""
    whole = len(values) // _AT_ONCE
    parts = _cascade(values[: whole * _AT_ONCE].reshape(whole, _AT_ONCE, *values.shape[1:]))
    for rest in values[whole * _AT_ONCE :]:
        parts[0] = parts[0] + rest
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _cascade(values: np.ndarray) -> np.ndarray:
    """The sum over the first axis, one after the other; of many, sums of sums."""
    power = max(4, math.ceil(math.log2(max(len(values), 1))) // _LEVELS)
    sums = np.zeros((_LEVELS, *values.shape[1:]), np.float32)
    for number, value in enumerate(values, 1):
        sums[0] += value
        level = 0
        while level + 1 < _LEVELS and number % (1 << power * (level + 1)) == 0:
            sums[level + 1] += sums[level]
            sums[level] = 0
            level += 1
    total = sums[0]
    for partial in sums[1:]:
        total = total + partial
    return total
