"""How much a session of tests does: README's command the usual, and more where the environment asks.

LIVE=1 runs TRL beside us where its side is recorded (parity/golden.py). THOROUGH=1 runs every case, with many examples
of each property, and lets trainers share no programs (shared_programs.py).
"""

from __future__ import annotations

import os
from typing import Any

import pytest

THOROUGH = bool(os.environ.get("THOROUGH"))
only_thorough = pytest.mark.skipif(not THOROUGH, reason="runs under THOROUGH=1")


def thorough(*values: Any) -> Any:
    """A case of `parametrize` that runs under THOROUGH=1 alone."""
    return pytest.param(*values, marks=only_thorough)


def drawn(many: int) -> int:
    """How many examples of a property hypothesis draws: `many` under THOROUGH=1, else a quarter of them."""
    return many if THOROUGH else many // 4
