"""The dataset on the Hub that a run's tables of completions are pushed to."""

from __future__ import annotations

import time
from pathlib import Path

from trl_jax.hub.network.push import Publisher, Upload

_SECONDS = 120  # between two commits, as in TRL: the Hub takes a limited number of them an hour
_CARD = """---
pretty_name: Completions of a training run
tags: [trl, trl_jax, trl-logs, completions]
---

# Completions of a training run

Written by trl_jax: a file for each log, and in it the last completions with their prompts, rewards and advantages.
"""


class CompletionsRepo:
    """Pushes files in the background, once in a while those that have come since. What is not pushed stays in the
    folder, and the log says so.

    Raises:
        PermissionError, ConnectionError: the repository cannot be opened.
    """

    def __init__(self, name: str, *, token: str | None, private: bool | None):
        self._publisher = Publisher(name, token=token, private=private, revision=None, repo_type="dataset")
        self._publisher.open()
        self._pushed_at, self._waiting = float("-inf"), []

    def __call__(self, path: Path) -> None:
        """A file was written."""
        self._waiting.append(path)
        if not self._publisher.running and time.monotonic() - self._pushed_at >= _SECONDS:
            self._push()

    def finish(self) -> None:
        """Push what is left, and wait for it."""
        if self._waiting:
            self._push()
        self._publisher.wait()

    def _push(self) -> None:
        folder, files = self._waiting[0].parent, [path.name for path in self._waiting]
        if not (folder / "README.md").exists():
            (folder / "README.md").write_text(_CARD, encoding="utf-8")
        self._waiting, self._pushed_at = [], time.monotonic()
        upload = Upload(folder, f"Completions up to {files[-1]}", ["README.md", *dict.fromkeys(files)])
        self._publisher.push_in_background([upload], done=lambda succeeded: None, daemon=False)
