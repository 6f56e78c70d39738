"""A safetensors file written in pieces equals what safetensors writes, with only one piece in memory."""

from __future__ import annotations

import weakref

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from trl_jax.core.files import Pieces, write_tensors


def of(array: np.ndarray, parts: int = 1) -> Pieces:
    return Pieces(array.shape, array.dtype, lambda: np.array_split(array, parts) if array.ndim else [array])


def test_safetensors_reads_it(tmp_path):
    dice = np.random.default_rng(0)
    arrays = {
        "b": dice.normal(size=(7, 5, 3)).astype(np.float32),
        "strided": dice.normal(size=(6, 4)).astype(np.float32).T,
        "half": dice.normal(size=(9,)).astype(ml_dtypes.bfloat16),
        "count": np.asarray(3, np.int32),
        "flags": np.asarray([True, False, True]),
        "a/b/0": dice.integers(0, 255, (2, 2)).astype(np.uint8),
        "none": np.zeros((0, 4), np.float32),
    }
    path = tmp_path / "some.safetensors"
    write_tensors(path, {name: of(array, parts=3) for name, array in arrays.items()})
    with safe_open(path, framework="numpy") as found:
        assert sorted(found.keys()) == sorted(arrays)
        for name, array in arrays.items():
            assert found.get_tensor(name).dtype == array.dtype
            np.testing.assert_array_equal(found.get_tensor(name), array)
        np.testing.assert_array_equal(found.get_slice("b")[2:4, :, 1:], arrays["b"][2:4, :, 1:])


def test_one_piece_at_a_time_is_in_memory(tmp_path):
    alive = []

    def read():
        for number in range(4):
            assert not [ref for ref in alive if ref() is not None]
            piece = np.full((2, 3), number, np.float32)
            alive.append(weakref.ref(piece))
            yield piece
            del piece

    write_tensors(tmp_path / "some.safetensors", {"x": Pieces((8, 3), np.dtype(np.float32), read)})
    assert len(alive) == 4


def test_pieces_that_do_not_make_up_the_tensor_are_an_error(tmp_path):
    short = Pieces((3, 3), np.dtype(np.float32), lambda: [np.zeros((2, 3), np.float32)])
    with pytest.raises(ValueError, match="tensor x should have 36 bytes, but 24 were read"):
        write_tensors(tmp_path / "some.safetensors", {"x": short})
