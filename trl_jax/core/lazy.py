"""Lets a package import its names when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def fetching(package: str, where: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the `__getattr__` of `package`.

    Args:
        where: name -> the module that defines it.
    """

    def fetch(name: str) -> Any:
        if name in where:
            value = getattr(importlib.import_module(where[name]), name)
            vars(importlib.import_module(package))[name] = value
            return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return fetch
