"""Completions as the arrays that a checkpoint keeps, and back."""

from __future__ import annotations

import numpy as np
import pytest

from trl_jax.rollout.rollout import Completed, Experience


def completed(prompt, completion, mask, logps):
    own = None if logps is None else np.asarray(logps, np.float32)
    arrays = np.asarray(prompt, np.int32), np.asarray(completion, np.int32), np.asarray(mask, bool)
    return Completed(*arrays, 0.5, own, None)


@pytest.mark.parametrize("logps", [None, [[-1.0, -2.0], [-3.0]]])
def test_what_is_saved_comes_back(logps):
    own = [None, None] if logps is None else logps
    rows = [completed([5, 6], [7, 8], [True, False], own[0]), completed([5], [9], [True], own[1])]
    back = Experience.of_arrays(Experience(rows).arrays())
    for row, wanted in zip(back.rows, rows, strict=True):
        for found, array in zip(row, wanted, strict=True):
            np.testing.assert_array_equal(found, array)
    assert back.num_tokens == 2


def test_a_checkpoint_has_the_names_that_earlier_ones_have():
    """Otherwise a run could not be resumed from one that was written before."""
    rows = [completed([5, 6], [7, 8], [True, False], [-1.0, -2.0])]
    names = {"advantage", "prompt", "prompt_length", "completion", "completion_length", "counted", "old_logps"}
    assert Experience(rows).arrays().keys() == names
