"""A stream: texts laid end to end in one row, and what each token of it may see."""

from __future__ import annotations

from typing import Any, NamedTuple

BLOCK = 64  # a stream's length is a multiple of it; of 64, 128 and 256 the quickest on a CPU


class Stream(NamedTuple):
    """What the tokens of a stream see of it; int32 arrays `[R, T]`, of NumPy or JAX.

    A token sees two runs of its row: from `start` to itself and, of a prompt that it shares with another text, from
    `prompt` up to but without `prompt_end`. The first token of the prompt has position 0. A token that only fills the
    stream starts behind its end, so that it sees nothing.

    `longest` is the length of the longest text among those that TRL would have run beside the token's own.
    """

    start: Any
    prompt: Any
    prompt_end: Any
    longest: Any
