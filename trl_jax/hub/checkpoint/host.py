"""Parts of arrays on the host, without a program for each shape: XLA takes longer to make it than to run."""

from __future__ import annotations

import jax
import numpy as np

SMALL = 64 << 20  # bytes


def taken(array: jax.Array | np.ndarray, index: tuple[int, ...]) -> np.ndarray:
    """`array[index]` on the host; a small array comes there whole."""
    if isinstance(array, jax.Array) and array.is_fully_addressable and array.nbytes <= SMALL:
        array = np.asarray(array)
    return np.asarray(array[index])
