"""Says on the bar of a run's steps what goes on between two of them."""

from __future__ import annotations

import sys
import time

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
        callbacks = self._events.handler.callbacks
        for bar in [one.training_bar for one in callbacks if isinstance(one, ProgressCallback)]:
            if bar is not None:
                bar.set_description_str(text)


class GenerationProgress:
    """Tells how many of `total` completions are done, and how many tokens a second are written."""

    def __init__(self, line: ProgressLine, total: int):
        self._line, self._total, self._began = line, total, time.monotonic()

    def __call__(self, done: int, tokens: int) -> None:
        speed = tokens / max(time.monotonic() - self._began, 1e-9)
        self._line(f"generating {done}/{self._total}, {speed:,.0f} tokens/s", often=done < self._total)
