"""Optimizer state and other progress in a checkpoint are written and read in pieces."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.mesh.mesh import pieces
from trl_jax.training import checkpoint_files
from trl_jax.training.checkpoint_files import (
    BrokenCheckpoint,
    LoopProgress,
    SavedProgress,
    progress_json,
    write_progress,
)


@pytest.mark.parametrize(("most", "sizes"), [(9999, [800]), (79, [80] * 10), (400, [400] * 2), (240, [240] * 3 + [80])])
def test_pieces_are_no_larger_than_asked_for(most, sizes):
    array = jnp.arange(200, dtype=jnp.float32).reshape(10, 20)
    found = list(pieces(array, most))
    assert [piece.nbytes for piece in found] == sizes
    np.testing.assert_array_equal(np.concatenate(found), array)
    assert array._npy_value is None  # no host copy was cached


def test_a_saved_tree_is_the_same_however_small_its_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "PIECE", 64)
    tree = {"mu": {"a.b": jnp.arange(60.0).reshape(5, 12)}, "count": jnp.asarray(7, jnp.int32)}
    text = progress_json(LoopProgress(epoch=2), {"own": 1})
    write_progress(tmp_path, [{"loss": np.float32(0.5)}], {"optimizer": tree}, text)
    saved = SavedProgress(tmp_path)
    assert saved.progress.epoch == 2 and saved.progress.unreported == [{"loss": np.float32(0.5)}]
    like = jax.eval_shape(lambda: tree)
    here = jax.tree.map(lambda leaf: leaf.sharding, tree)
    for found in (saved.tree("optimizer", like), saved.tree("optimizer", like, here)):
        jax.tree.map(np.testing.assert_array_equal, found, tree)


def test_who_does_not_write_reads_all_the_same(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(checkpoint_files, "pieces", lambda array, most: read.append(array.shape) or iter([array]))
    trees = {"optimizer": {"nu": jnp.zeros((2, 3)), "mu": jnp.zeros(4)}}
    write_progress(tmp_path, [], trees, "", writes=False)
    assert sorted(read) == [(2, 3), (4,)] and not list(tmp_path.iterdir())


def test_a_random_state_that_lacks_a_word_is_named(tmp_path):
    facts = json.loads(progress_json(LoopProgress(), {}))
    facts["random"]["numpy"][1].pop()
    write_progress(tmp_path, [{"loss": np.float32(0.5)}], {"optimizer": {"count": jnp.asarray(7)}}, json.dumps(facts))
    with pytest.raises(BrokenCheckpoint, match="random is no state of the generators"):
        SavedProgress(tmp_path)
