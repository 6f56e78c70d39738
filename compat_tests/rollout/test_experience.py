"""Completions converted to the arrays of a checkpoint and back."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from trl_jax.rollout.rollout import Completed, Experience, Written


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


@pytest.mark.parametrize("calls", [None, (2, 1)])
def test_completions_that_are_generated_ahead_come_back(calls):
    ids, logps = [np.int32([7, 8, 9]), np.int32([4])], [np.float32([-1, np.nan, -2]), np.float32([-3])]
    by_model = [np.asarray([True, calls is None, True]), np.asarray([True])]
    messages = None if calls is None else [[{"role": "assistant", "content": "ä"}], []]
    made = Written([[1, 2], [3]], ids, by_model, messages=messages, calls=calls, sampling_logps=logps)
    back = Written.of_arrays(made.arrays())
    assert (back.prompt_ids, back.messages, back.calls) == (made.prompt_ids, messages, calls)
    for name in ("completion_ids", "by_model", "sampling_logps"):
        for own, other in zip(vars(back)[name], vars(made)[name], strict=True):
            np.testing.assert_array_equal(own, other)


def test_pictures_of_tools_come_back():
    picture = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
    content = [
        {"type": "image", "image": picture},
        {"type": "image", "image": "cat.png"},
        {"type": "text", "text": "?"},
    ]
    messages, ids = [[{"role": "tool", "name": "draw", "content": content}]], [np.int32([7])]
    made = Written([[1]], ids, [np.asarray([True])], messages=messages, calls=(1, 0), sampling_logps=[np.float32([-1])])
    [[message]] = Written.of_arrays(made.arrays()).messages
    back, *others = message["content"]
    np.testing.assert_array_equal(np.asarray(back["image"]), np.asarray(picture))
    assert others == content[1:] and message["name"] == "draw"


def test_a_checkpoint_has_the_names_that_earlier_ones_have():
    """Otherwise runs could not resume from older checkpoints."""
    rows = [completed([5, 6], [7, 8], [True, False], [-1.0, -2.0])]
    names = {"advantage", "prompt", "prompt_length", "completion", "completion_length", "counted", "old_logps"}
    assert Experience(rows).arrays().keys() == names
