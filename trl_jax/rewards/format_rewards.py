"""Rewards for the format of a completion."""

from __future__ import annotations

import re
from typing import Any

from trl_jax.rewards.contents import contents

_THINKS = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)


def think_format_reward(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """1.0 if a completion (a list of one message) starts with exactly one <think>...</think> block, else 0.0."""
    return [float(_THINKS.match(text) is not None) for text in contents(completions, "think_format_reward")]
