"""Readable axes: round ticks with distinct labels, untruncated labels, and no negative ticks without negative
values."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_jax.core.curves import Curve, svg

LABEL = re.compile(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="(end|middle)">(.+?)</text>')


def labels(values: list[float], side: str = "end") -> list[str]:
    """The labels of the values from low to high; with side="middle", those of the steps."""
    picture = svg({"loss": [Curve("#000", list(enumerate(values)))]})
    ElementTree.fromstring(picture)
    return [text for _, where, text in LABEL.findall(picture) if where == side]


@pytest.mark.parametrize(("values", "expected"), [
    ([5.726, 5.7311, 5.734], ["5.726", "5.728", "5.730", "5.732", "5.734"]),
    ([0.001, 0.98], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ([3.0, 3.0], ["1", "2", "3", "4", "5"]),
    ([0.0, 0.0], ["0.0", "0.5"]),
    ([-0.3, 0.4], ["-0.4", "-0.2", "0.0", "0.2", "0.4"]),
    ([0, 12_345], ["0", "5,000", "10,000", "15,000"]),
    ([2e-7, 5e-7], ["2e-07", "3e-07", "4e-07", "5e-07"]),
])  # fmt: skip
def test_ticks_are_round(values, expected):
    assert labels(values) == expected


def test_steps_are_whole_and_the_axis_has_its_name():
    assert labels([1.0, 2.0, 3.0], "middle") == ["0", "1", "2", "step"]
    assert labels([1.0] * 401, "middle") == ["0", "200", "400", "step"]


@given(st.lists(st.floats(-1e12, 1e12, allow_subnormal=False), min_size=1, max_size=8))
def test_any_curve_stays_in_its_panel_with_different_labels(values):
    picture = svg({"loss": [Curve("#000", list(enumerate(values)))]})
    found = [text for _, where, text in LABEL.findall(picture) if where == "end"]
    assert len(set(found)) == len(found) >= 2 and len(found) <= 8
    if min(values) >= 0:
        assert not any(text.startswith("-") for text in found)
    [left] = {float(x) for x, where, _ in LABEL.findall(picture) if where == "end"}
    assert left >= 6.5 * max(map(len, found))  # labels end there, so the first digit is inside the picture
    for x, y in re.findall(r'<circle cx="([\d.-]+)" cy="([\d.-]+)"', picture):
        assert left < float(x) <= 640 - 24 + 0.1 and 28 - 0.1 <= float(y) <= 152 + 0.1
