"""A cache part holds the layers of a run with the same attention window; the layers repeat a short pattern."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trl_jax.models.arch import LayerKind, Run, layer_pattern_of


def pattern_of(windows, chunks=None, first=0):
    return layer_pattern_of(
        SimpleNamespace(windows=windows, chunks=chunks), Run(first, len(windows) - first, LayerKind(), "")
    )


@pytest.mark.parametrize(
    ("windows", "parts", "part_of"),
    [
        ([None] * 3, [((0, 1, 2), None)], (0,)),
        ([4] * 3, [((0, 1, 2), 4)], (0,)),
        ([4, None, 4, None], [((0, 2), 4), ((1, 3), None)], (0, 1)),
        ([4, 4, None, 4, 4, None, 4, 4], [((0, 1, 3, 4, 6, 7), 4), ((2, 5), None)], (0, 0, 1)),
        ([4, 4, None, None], [((0, 1), 4), ((2, 3), None)], (0, 0, 1, 1)),
        # No pattern of at most eight layers: a single part that keeps all tokens.
        ([4] * 6 + [None] * 6, [(tuple(range(12)), None)], (0,)),
    ],
)
def test_layers_of_a_period(windows, parts, part_of):
    found = pattern_of(windows)
    assert [tuple(part) for part in found.parts] == parts and found.part_of == part_of


def test_layers_that_see_chunks_and_those_of_a_later_run():
    assert pattern_of([None] * 4, (8, 8, 8, None)).parts == (((0, 1, 2), 8), ((3,), None))
    assert pattern_of([4, None, 4, None], first=2).parts == (((2,), 4), ((3,), None))
