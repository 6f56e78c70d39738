"""Conversations with scripted first turns that call tools, because a tiny model would not."""

from __future__ import annotations

from functools import cache

from compat_tests.rollout.test_tools import CALLS, END, add, tokenizer_of

__all__ = ["FIRST", "Shop", "add", "conversations", "words"]

_BUY = '<tool_call>{"name": "buy", "arguments": {"what": "pen"}}</tool_call>' + END
_UNKNOWN = '<tool_call>{"name": "none", "arguments": {}}</tool_call>' + END
# Number of items in the shop -> the first turns of two completions.
FIRST = {0: [_BUY, "No." + END], 1: [CALLS["json"] + END, _UNKNOWN]}


@cache
def words():
    return tokenizer_of("json")


def conversations(count: int) -> list[dict]:
    """Prompts, each with what the shop has at the start."""
    return [{"prompt": [{"role": "user", "content": f"What is {i} and {i}?"}], "start": i % 2} for i in range(count)]


class Shop:
    """Sells."""

    def reset(self, start, **row):
        self.bought = 0
        return f" You have {start}."

    def buy(self, what: str) -> str:
        """Buy a thing.

        Args:
            what: the thing.
        """
        self.bought += 1
        return f"one {what}"

    def get_reward(self):
        return float(self.bought)
