"""Training and generation on eight devices."""

from __future__ import annotations

from compat_tests.mesh import eight

STEPS = {"devices"}


def test_steps():
    eight.check(STEPS)


def test_all_but_steps():
    names = eight.FILES - STEPS
    assert len(names) >= 9
    eight.check(names)
