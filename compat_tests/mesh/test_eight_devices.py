"""Steps and weights on eight devices; a file of its own, so that it runs beside test_eight_writers."""

from __future__ import annotations

from compat_tests.mesh import eight

STEPS = {"devices"}


def test_steps():
    eight.check(STEPS)


def test_all_but_steps_and_writers():
    names = eight.FILES - eight.WRITING - STEPS
    assert len(names) >= 6
    eight.check(names)
