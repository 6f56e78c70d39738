"""The order of prompts beside TRL's sampler, over several epochs and from where a run was cut off."""

from __future__ import annotations

import numpy as np
import pytest

sampler = pytest.importorskip("trl_jax.rollout.sampler")

SHAPES = [(7, 3, 4), (8, 2, 1), (5, 5, 2), (640, 16, 6), (3, 1, 3)]


def ours(rows, chunk, repeats, **options):
    return sampler.RepeatSampler(rows, chunk=chunk, repeats=repeats, **options)


def epochs(made, count):
    """The chunks that are given out, each as many times as it is, of `count` more epochs."""
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


def test_a_second_run_begins_anew():
    made = ours(9, 2, 3, shuffle=True, seed=1)
    first = list(epochs(made, 2))
    made.begin()
    assert list(epochs(made, 2)) == first
