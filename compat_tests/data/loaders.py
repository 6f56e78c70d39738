"""Builds loaders of examples from one set of options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from trl_jax.data.batch import Columns
from trl_jax.data.loader import ExampleLoader, StepLayout

_OF_LAYOUT = {field.name for field in fields(StepLayout)}


def example_loader(dataset: Any, columns: Columns, example: Callable | None = None, **options: Any) -> ExampleLoader:
    """A loader of these columns; `options` are fields of the loader or of its layout."""
    layout = StepLayout(**{name: value for name, value in options.items() if name in _OF_LAYOUT})
    own = {name: value for name, value in options.items() if name not in _OF_LAYOUT}
    return ExampleLoader(dataset, columns, example or columns.example, layout, **own)
