"""Training and generation on eight devices."""

from __future__ import annotations

import pytest

from compat_tests.mesh import eight

STEPS = {"devices"}


def test_everything():
    assert len(eight.FILES) >= 10
    eight.check(eight.FILES)


def test_steps(request):
    """For other releases of JAX (.ci/run), by itself."""
    if any(item.function is test_everything for item in request.session.items):
        pytest.skip("test_everything runs them, too")
    eight.check(STEPS)
