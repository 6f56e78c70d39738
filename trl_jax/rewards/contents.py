"""Extract the text of conversational completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def contents(completions: Sequence[Any], function: str) -> list[str]:
    """The text of each completion, a list of one message. Raises TypeError naming `function` for plain strings."""
    if any(isinstance(one, str) for one in completions):
        raise TypeError(
            f"{function} needs conversational completions, but these are plain strings, because the prompts are. Make "
            "each prompt a list of messages, such as [{'role': 'user', 'content': prompt}]."
        )
    return [messages[0]["content"] for messages in completions]
