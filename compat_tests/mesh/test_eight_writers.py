"""Experts, completions and what learns from them on eight devices."""

from __future__ import annotations

from compat_tests.mesh import eight


def test_eight_devices_that_write():
    assert eight.WRITING < eight.FILES
    eight.check(eight.WRITING)
