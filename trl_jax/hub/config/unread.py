"""Keys of a config.json that transformers' code of its model does not read: whoever trains it there does without."""

from __future__ import annotations

import dataclasses
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

_SHARED = ("cache_utils.py", "masking_utils.py", "modeling_rope_utils.py")


def is_unread(config_class: Any, key: str) -> bool:
    """Whether neither the class of the config nor the models' code beside it, nor what all models share, mentions a
    key. False where the code is not there to be read."""
    if key in config_class.attribute_map or any(key == field.name for field in dataclasses.fields(config_class)):
        return False
    code = _code(config_class)
    return bool(code) and not re.search(rf"""(\.{re.escape(key)}\b|["']{re.escape(key)}["'])""", code)


@cache
def _code(config_class: Any) -> str:
    folder = Path(inspect.getfile(config_class)).parent
    files = [*folder.glob("*.py"), *(folder.parent.parent / name for name in _SHARED)]
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
