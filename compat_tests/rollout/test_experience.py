"""Completions converted to the arrays of a checkpoint and back."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trl_jax.rollout.rollout import Experience, GeneratedCompletions, ScoredCompletion


def completed(prompt, completion, mask, logps):
    own = None if logps is None else np.asarray(logps, np.float32)
    arrays = np.asarray(prompt, np.int32), np.asarray(completion, np.int32), np.asarray(mask, bool)
    return ScoredCompletion(*arrays, 0.5, own, None)


@pytest.mark.parametrize("logps", [None, [[-1.0, -2.0], [-3.0]]])
def test_what_is_saved_comes_back(logps):
    own = [None, None] if logps is None else logps
    rows = [completed([5, 6], [7, 8], [True, False], own[0]), completed([5], [9], [True], own[1])]
    back = Experience.from_arrays(Experience(rows).arrays())
    for row, wanted in zip(back.rows, rows, strict=True):
        for found, array in zip(row, wanted, strict=True):
            np.testing.assert_array_equal(found, array)
    assert back.num_tokens == 2


@pytest.mark.parametrize("calls", [None, (2, 1)])
def test_completions_that_are_generated_ahead_come_back(calls):
    ids, logps = [np.int32([7, 8, 9]), np.int32([4])], [np.float32([-1, np.nan, -2]), np.float32([-3])]
    by_model = [np.asarray([True, calls is None, True]), np.asarray([True])]
    messages = None if calls is None else [[{"role": "assistant", "content": "ä"}], []]
    made = GeneratedCompletions([[1, 2], [3]], ids, by_model, messages=messages, calls=calls, sampling_logps=logps)
    back = GeneratedCompletions.from_arrays(made.arrays())
    assert (back.prompt_ids, back.messages, back.calls) == (made.prompt_ids, messages, calls)
    for name in ("completion_ids", "by_model", "sampling_logps"):
        for own, other in zip(vars(back)[name], vars(made)[name], strict=True):
            np.testing.assert_array_equal(own, other)


def written(content):
    messages = [[{"role": "assistant", "content": "ä"}, {"role": "tool", "name": "draw", "content": content}]]
    one = np.asarray([True])
    return GeneratedCompletions(
        [[1]], [np.int32([7])], [one], messages=messages, calls=(1, 0), sampling_logps=[np.float32([-1])]
    )


def test_pictures_of_tools_come_back():
    """In every form that `open_picture` takes, with their modes."""
    array = np.arange(16, dtype=np.uint8).reshape(2, 2, 4)
    pictures = [Image.fromarray(array).convert(mode) for mode in ("RGBA", "RGB", "L", "LA", "1", "CMYK", "F", "I")]
    buffer = io.BytesIO()
    pictures[0].save(buffer, "PNG")
    data = buffer.getvalue()
    others = [
        array,
        array[..., 0],
        data,
        {"bytes": data, "path": None},
        {"path": "cat.png"},
        Path("cat.png"),
        "cat.png",
    ]
    content = [{"type": "image", "image": own} for own in (*pictures, *others)] + [{"type": "text", "text": "?"}]
    made = written(content)
    [[first, message]] = GeneratedCompletions.from_arrays(made.arrays()).messages
    assert first == made.messages[0][0] and message["name"] == "draw" and message["content"][-1] == content[-1]
    back = [part["image"] for part in message["content"][:-1]]
    for found, wanted in zip(back, pictures, strict=False):
        assert found.mode == wanted.mode
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    for found, wanted in zip(back[len(pictures) :], others, strict=True):
        assert type(found) is type(wanted)
        np.testing.assert_equal(found, wanted)
    assert all(part["image"] is own for part, own in zip(content, (*pictures, *others), strict=False))


def test_pictures_in_modes_that_no_file_has_are_converted():
    [[_, message]] = GeneratedCompletions.from_arrays(
        written([{"type": "image", "image": Image.new("HSV", (2, 2))}]).arrays()
    ).messages
    assert message["content"][0]["image"].mode == "RGB"


def test_values_of_tools_that_a_checkpoint_cannot_have_are_named():
    wanted = "The answer of the tool 'draw' cannot be saved in a checkpoint: Object of type float32 is not"
    with pytest.raises(TypeError, match=wanted):
        written([{"type": "number", "number": np.float32(1)}]).arrays()


def test_a_checkpoint_has_the_names_that_earlier_ones_have():
    """Otherwise runs could not resume from older checkpoints."""
    rows = [completed([5, 6], [7, 8], [True, False], [-1.0, -2.0])]
    names = {"advantage", "prompt", "prompt_length", "completion", "completion_length", "counted", "old_logps"}
    assert Experience(rows).arrays().keys() == names
