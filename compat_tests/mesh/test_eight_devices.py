"""Steps and weights on eight devices; a file of its own, so that it runs beside test_eight_writers."""

from __future__ import annotations

from compat_tests.mesh import eight


def test_eight_devices():
    names = eight.FILES - eight.WRITING
    assert len(names) >= 6
    eight.check(names)
