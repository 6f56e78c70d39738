"""Signals as a terminal has them, for tests that send one."""

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
    """No signal is ignored, as SIGINT is by what a shell starts in the background, and SIGHUP under nohup.

    Programs that the test starts hear them, too.
    """
    before = {number: signal.signal(number, handler) for number, handler in DEFAULTS.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
