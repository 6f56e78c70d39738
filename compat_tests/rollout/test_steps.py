"""The order of prompts is that of TRL's sampler, over several epochs and after resuming at any step."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset

from trl_jax.rollout import steps

SHAPES = [(7, 3, 4), (8, 2, 1), (5, 5, 2), (640, 16, 6), (3, 1, 3)]


def ours(rows, chunk, repeats, **options):
    return steps.RepeatSampler(rows, chunk=chunk, repeats=repeats, **options)


def epochs(made, count):
    """The chunks of the next `count` epochs, including repeats."""
    for _ in range(count):
        made.next_epoch()
        while made.has_next:
            yield made.next().tolist()


@pytest.mark.parametrize(("shuffle", "seed"), [(True, 0), (True, 42), (True, 2**32 - 1), (False, 3)])
@pytest.mark.parametrize(("rows", "chunk", "repeats"), SHAPES)
def test_the_order_is_trls_over_several_epochs(rows, chunk, repeats, shuffle, seed):
    utils = pytest.importorskip("trl.trainer.utils")
    theirs = utils.RepeatSampler(range(rows), 2, chunk, repeats, shuffle, seed)
    wanted = [index for _ in range(4) for index in theirs]
    made = ours(rows, chunk, repeats, shuffle=shuffle, seed=seed)
    found = [index for prompts in epochs(made, 4) for index in np.repeat(prompts, 2).tolist()]
    assert found == wanted and len(found) == 4 * len(theirs)
    assert not shuffle or rows < 5 or found[: len(theirs)] != found[len(theirs) : 2 * len(theirs)]


@pytest.mark.parametrize(("rows", "chunk", "repeats"), SHAPES)
def test_it_goes_on_from_any_place_as_if_nothing_had_been(rows, chunk, repeats):
    whole = list(epochs(ours(rows, chunk, repeats, shuffle=True, seed=5), 3))
    for place in range(len(whole)):
        made, again = ours(rows, chunk, repeats, shuffle=True, seed=5), ours(rows, chunk, repeats, shuffle=True, seed=6)
        gone = []
        while len(gone) <= place:
            if not made.has_next:
                made.next_epoch()
            gone.append(made.next().tolist())
        again.restore(made.state())
        left = len(whole) - len(gone)
        while again.has_next and left:
            gone.append(again.next().tolist())
            left -= 1
        gone += [chunk for chunk, _ in zip(epochs(again, 3), range(left), strict=False)]
        assert gone == whole


@pytest.mark.parametrize(("rows", "chunk", "repeats"), SHAPES)
def test_the_following_chunk_is_known_beyond_the_end_of_an_epoch(rows, chunk, repeats):
    made = ours(rows, chunk, repeats, shuffle=True, seed=5)
    announced, found = [], []
    for _ in range(3):
        made.next_epoch()
        while made.has_next:
            found.append(made.next().tolist())
            announced.append(made.following().tolist())
    assert announced[:-repeats] == found[repeats:]


def test_a_second_run_begins_anew():
    made = ours(9, 2, 3, shuffle=True, seed=1)
    first = list(epochs(made, 2))
    made.begin()
    assert list(epochs(made, 2)) == first
    made.begin(1)
    assert list(epochs(made, 1)) == first[len(first) // 2 :]


def of_stream(rows, chunk, repeats, seed=None):
    stream = Dataset.from_dict({"prompt": [str(row) for row in range(rows)]}).to_iterable_dataset()
    stream = stream if seed is None else stream.shuffle(seed=seed, buffer_size=3)
    return steps.StreamSampler(stream, chunk=chunk, repeats=repeats)


def given(made, count):
    for _ in range(count):
        made.next_epoch()
        while made.has_next:
            yield [row["prompt"] for row in made.next()]


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize(("rows", "chunk", "repeats"), [shape for shape in SHAPES if shape[0] < 100])
def test_a_stream_is_given_out_as_trls_is(rows, chunk, repeats, seed):
    utils = pytest.importorskip("trl.trainer.utils")
    stream = Dataset.from_dict({"prompt": [str(row) for row in range(rows)]}).to_iterable_dataset()
    stream = stream if seed is None else stream.shuffle(seed=seed, buffer_size=3)
    theirs, wanted = utils.repeat_iterable_dataset(stream, 2, chunk, repeats), []
    for epoch in range(3):
        theirs.set_epoch(epoch)
        wanted += [row["prompt"] for row in theirs]
    found = [prompt for prompts in given(of_stream(rows, chunk, repeats, seed), 3) for prompt in prompts for _ in "ab"]
    assert found == wanted


@pytest.mark.parametrize(("rows", "chunk", "repeats"), [(7, 3, 4), (6, 2, 1), (5, 5, 2)])
def test_a_stream_goes_on_from_any_place(rows, chunk, repeats):
    whole = list(given(of_stream(rows, chunk, repeats, 5), 3))
    for place in range(len(whole)):
        made, gone = of_stream(rows, chunk, repeats, 5), []
        while len(gone) <= place:
            if not made.has_next:
                made.next_epoch()
            gone.append([row["prompt"] for row in made.next()])
        again = of_stream(rows, chunk, repeats, 5)
        again.restore(made.state())
        while len(gone) < len(whole):
            if not again.has_next:
                again.next_epoch()
            gone.append([row["prompt"] for row in again.next()])
        assert gone == whole
    made.begin()
    assert list(given(made, 3)) == whole
    made.begin(2)
    assert list(given(made, 1)) == whole[len(whole) // 3 * 2 :]
