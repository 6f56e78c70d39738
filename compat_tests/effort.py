"""How much of the test suite runs, set by environment variables.

By default the usual cases run. LIVE=1 runs TRL itself instead of reading its recorded runs (parity/golden.py).
THOROUGH=1 runs every case, draws more examples per property, and does not let trainers share programs
(shared_programs.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

THOROUGH = bool(os.environ.get("THOROUGH"))
only_thorough = pytest.mark.skipif(not THOROUGH, reason="runs under THOROUGH=1")


def thorough(*values: Any) -> Any:
    """A case for `parametrize` that runs only under THOROUGH=1."""
    return pytest.param(*values, marks=only_thorough)


def usually(usual: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize` (tuples or single values): those for which `usual` is true always run, the others only
    under THOROUGH=1."""
    parts = [(case, case if isinstance(case, tuple) else (case,)) for case in cases]
    return [case if usual(*values) else thorough(*values) for case, values in parts]


def usual(*ids: str) -> pytest.MarkDecorator:
    """Decorator: the cases with these pytest ids always run, the others only under THOROUGH=1."""
    return pytest.mark.usual(*ids)


def leave_to_thorough(items: Iterable[pytest.Item], *, whole: bool) -> None:
    """Mark the cases that `usual` does not name as THOROUGH=1 only.

    Args:
        items: the collected tests.
        whole: whether `items` has all cases of each test, so that an id that matches none is a mistake.

    Raises:
        pytest.UsageError: an id matches no case of its test.
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
    """How many examples hypothesis draws per property: `many` under THOROUGH=1, otherwise a quarter of them."""
    return many if THOROUGH else many // 4
