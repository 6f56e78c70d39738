"""JSON in which no object has a name twice: readers differ in which of the values they take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trl_jax.core import memory_errors
from trl_jax.core.printable import brief


def loads(text: str | bytes) -> Any:
    """The value of a text of JSON.

    Raises:
        ValueError: it is no JSON, or an object in it has a name twice; the text says which.
        RecursionError: it is too deep.
    """
    return json.loads(text, object_pairs_hook=_object)


def read(path: Path) -> Any:
    """The value of a file of JSON in UTF-8; errors as of `loads`, and MemoryError with the file's name."""
    with memory_errors.naming(path):
        return loads(path.read_text(encoding="utf-8"))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the name {brief(twice)} is in one object twice: keep the one that is meant")
    return values
