"""How much a session of tests does: README's command the usual, and more where the environment asks.

LIVE=1 runs TRL beside us where its side is recorded (parity/golden.py). THOROUGH=1 runs every case, with many examples
of each property, and lets trainers share no programs (shared_programs.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

THOROUGH = bool(os.environ.get("THOROUGH"))
only_thorough = pytest.mark.skipif(not THOROUGH, reason="runs under THOROUGH=1")


def thorough(*values: Any) -> Any:
    """A case of `parametrize` that runs under THOROUGH=1 alone."""
    return pytest.param(*values, marks=only_thorough)


def usually(usual: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """The cases of `parametrize`, tuples or single values: those that `usual` is true of run always, the others under
    THOROUGH=1 alone."""
    parts = [(case, case if isinstance(case, tuple) else (case,)) for case in cases]
    return [case if usual(*values) else thorough(*values) for case, values in parts]


def usual(*ids: str) -> pytest.MarkDecorator:
    """The cases of a test that run always, by the ids that pytest gives them; the others run under THOROUGH=1 alone."""
    return pytest.mark.usual(*ids)


def leave_to_thorough(items: Iterable[pytest.Item], *, whole: bool) -> None:
    """Mark the cases that `usual` does not name.

    Args:
        whole: whether `items` has all cases of each test, so that a name of none is a mistake.

    Raises:
        pytest.UsageError: a test has no case of a name.
    """
    cases: dict[str, tuple[set[str], set[str]]] = {}
    for item in items:
        marker = item.get_closest_marker("usual")
        if marker is not None:
            named, there = cases.setdefault(item.nodeid.partition("[")[0], (set(marker.args), set()))
            there.add(item.callspec.id)
            if item.callspec.id not in named:
                item.add_marker(only_thorough)
    for test, (named, there) in cases.items():
        if whole and not named <= there:
            raise pytest.UsageError(f"{test}: has no case {sorted(named - there)}, which `usual` names.")


def drawn(many: int) -> int:
    """How many examples of a property hypothesis draws: `many` under THOROUGH=1, else a quarter of them."""
    return many if THOROUGH else many // 4
