"""Default signal handlers, for tests that send signals."""

from __future__ import annotations

import signal

import pytest

DEFAULTS = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_DFL,
}


@pytest.fixture
def heard():
    """Restores default handlers: a shell ignores SIGINT for background jobs, and nohup ignores SIGHUP.

    Child processes inherit them.
    """
    before = {number: signal.signal(number, handler) for number, handler in DEFAULTS.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
