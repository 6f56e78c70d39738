"""The texts of completions that are conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def contents(completions: Sequence[Any], function: str) -> list[str]:
    """The text of each completion, a list of one message. Raises TypeError, in the function's name, for plain texts."""
    if any(isinstance(one, str) for one in completions):
        raise TypeError(
            f"{function} judges answers in conversations, and these completions are texts, as their prompts are. Make "
            "each prompt a list of messages, as in [{'role': 'user', 'content': prompt}]."
        )
    return [messages[0]["content"] for messages in completions]
