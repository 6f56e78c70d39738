"""Chat templates that mark what the assistant says."""

from __future__ import annotations

import re
from typing import Any


def has_generation_markers(chat_template: str | dict[str, str]) -> bool:
    """Whether a template marks what the assistant says; of several by name, the one called "default"."""
    text = chat_template["default"] if isinstance(chat_template, dict) else chat_template
    return re.search(r"\{%-?\s*generation\s*-?%\}", text) is not None


def training_template(tokenizer: Any) -> str | None:
    """None where the tokenizer's own template marks what the assistant says."""
    if tokenizer.chat_template is None or has_generation_markers(tokenizer.chat_template):
        return None
    raise ValueError("The chat template is not training-compatible")
