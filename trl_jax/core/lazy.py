"""Lets a package import its names when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def fetching(package: str, where: Mapping[str, str], planned: frozenset[str] = frozenset()) -> Callable[[str], Any]:
    """Make the `__getattr__` of `package`.

    Args:
        where: name -> the module that defines it.
        planned: names of TRL's that are not built; they raise an ImportError that says so.
    """

    def fetch(name: str) -> Any:
        if name in where:
            value = getattr(importlib.import_module(where[name]), name)
            vars(importlib.import_module(package))[name] = value
            return value
        if name in planned:
            raise ImportError(
                f"{package} has no {name}: it is one of TRL's names that this release does not build. "
                f"It has {', '.join(sorted(where))}."
            )
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return fetch
