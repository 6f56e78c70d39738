"""Sums in torch's order, bitwise equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compat_tests.effort import drawn
from trl_jax.core.torch_random import torch_sum

GENERATOR = np.random.default_rng(0)
LENGTHS = sorted({1, 3, 7, 8, 9, 31, 64, 300, 4097} | set(GENERATOR.integers(1, 600, drawn(60)).tolist()))


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_rows_and_all_of_them(rows):
    for length in LENGTHS:
        values = GENERATOR.random((rows, length), np.float32)
        np.testing.assert_array_equal(torch_sum(values, 1), torch.tensor(values).nansum(1).numpy(), str(length))
        if values.size < 2**15:  # torch divides larger ones over threads
            assert torch_sum(values) == torch.tensor(values).nansum().item()


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 7, 8, 9, 33])
def test_columns(columns):
    for length in (1, 2, 5, 8, 16, 24):
        values = GENERATOR.random((3, length, columns), np.float32)
        np.testing.assert_array_equal(torch_sum(values, 1), torch.tensor(values).nansum(1).numpy(), str(length))


def test_another_axis_is_refused():
    with pytest.raises(ValueError, match="axis must be 1, of two or three axes, got axis=0 of 2"):
        torch_sum(np.ones((2, 2), np.float32), 0)
