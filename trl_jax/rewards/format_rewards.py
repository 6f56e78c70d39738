"""Rewards for the form of a completion."""

from __future__ import annotations

import re
from typing import Any

_THINKS = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)


def think_format_reward(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """1.0 for each completion (a list of one message) that thinks once, in <think>...</think> first; else 0.0."""
    return [float(_THINKS.match(messages[0]["content"]) is not None) for messages in completions]
