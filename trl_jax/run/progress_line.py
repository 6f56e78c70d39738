"""Says on the bar of a run's steps what goes on between two of them."""

from __future__ import annotations

import sys
import time
from typing import Any

from transformers.trainer_callback import ProgressCallback

from trl_jax.engine.events import Events

_SECONDS = 0.1  # between two looks of a person


class ProgressLine:
    """The words before the bar that transformers' ProgressCallback shows: of terminals alone, as a log would get a line
    for each of them, and of none with disable_tqdm."""

    def __init__(self, events: Events):
        self._events, self._told_at = events, float("-inf")

    def __call__(self, text: str, *, often: bool = False) -> None:
        """Say it.

        Args:
            often: it is said again and again, and not each time has to be seen.
        """
        now = time.monotonic()
        if not sys.stderr.isatty() or (often and now - self._told_at < _SECONDS):
            return
        self._told_at = now
        for bar in _bars(self._events):
            bar.set_description_str(text)


class CompilationUntimed:
    """Leaves the compiler's time out of what the bar of a run's steps expects of those to come."""

    def __init__(self, events: Events):
        self._events, self._shapes = events, set()

    def done(self, shape: tuple[int, ...]) -> None:
        """A step whose tokens have this shape was begun; for the first of each shape it was compiled before."""
        if shape in self._shapes:
            return
        self._shapes.add(shape)
        for bar in _bars(self._events):
            bar.unpause()


def _bars(events: Events) -> list[Any]:
    """The bars of a run's steps that transformers' callbacks show."""
    callbacks = [one for one in events.handler.callbacks if isinstance(one, ProgressCallback)]
    return [one.training_bar for one in callbacks if one.training_bar is not None]


class GenerationProgress:
    """Tells how many of `total` completions are done, and how many tokens a second are written."""

    def __init__(self, line: ProgressLine, total: int):
        self._line, self._total, self._began = line, total, time.monotonic()

    def __call__(self, done: int, tokens: int) -> None:
        speed = tokens / max(time.monotonic() - self._began, 1e-9)
        self._line(f"generating {done}/{self._total}, {speed:,.0f} tokens/s", often=done < self._total)
