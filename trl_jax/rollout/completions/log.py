"""The last completions of a run: shown as a table, written to a file, and given to trackers."""

from __future__ import annotations

import json
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from trl_jax.core.files.whole_file import replacing
from trl_jax.rollout.completions.repo import CompletionsRepo
from trl_jax.rollout.completions.table import print_completions

logger = logging.getLogger(__name__)

Mode = Literal["train", "eval"]


@dataclass
class CompletionsLog:
    """The last completions, those of training and those of evaluations apart.

    Attributes:
        names: of the reward functions; None where completions are not judged.
        size: how many completions are kept.
        num_to_print: how many of them are shown, drawn at random; None: all.
        unique_prompts: trackers get each prompt once.
        folder: where files are written; None: nowhere. Those of evaluations begin with eval_.
        trackers: functions that are given a table as a pandas DataFrame.
        repo: gets each file; None where they stay here.
    """

    names: Sequence[str] | None
    size: int
    num_to_print: int | None = None
    unique_prompts: bool = False
    folder: Path | None = None
    trackers: Sequence[Callable[[pd.DataFrame], None]] = ()
    repo: CompletionsRepo | None = None
    _rows: dict[Mode, deque[dict[str, Any]]] = field(init=False)

    def __post_init__(self):
        self._rows = defaultdict(lambda: deque(maxlen=self.size))

    def add(
        self,
        mode: Mode,
        prompts: list,
        completions: list,
        rewards: np.ndarray | None = None,
        advantages: np.ndarray | None = None,
        extra: Mapping[str, list] | None = None,
    ) -> None:
        """Keep the completions of a generation.

        Args:
            rewards: `[B, F]`. advantages: `[B]`. None of both where completions are not judged.
            extra: further columns, of `log_extra`; generations may have different ones.
        """
        further = dict(extra or {})
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            row = {"prompt": prompt, "completion": completion}
            row["extra"] = {name: values[number] for name, values in further.items()}
            if self.names is not None:
                row["rewards"] = dict(zip(self.names, rewards[number].tolist(), strict=True))
                row["advantage"] = float(advantages[number])
            self._rows[mode].append(row)

    def table(self, mode: Mode, step: int) -> dict[str, list]:
        """The columns in TRL's order: step, prompt, completion, each reward, each further column, advantage. A further
        column is None where a generation had none of it."""
        rows, judged = self._rows[mode], self.names is not None
        found = dict.fromkeys(name for row in rows for name in row["extra"])
        return {
            "step": [step] * len(rows),
            "prompt": [row["prompt"] for row in rows],
            "completion": [row["completion"] for row in rows],
            **{name: [row["rewards"][name] for row in rows] for name in self.names or ()},
            **{name: [row["extra"].get(name) for row in rows] for name in found},
            **({"advantage": [row["advantage"] for row in rows]} if judged else {}),
        }

    def log(self, mode: Mode, step: int) -> None:
        """Show the table, write it to a file, and give it to the trackers; nothing without completions."""
        table = self.table(mode, step)
        if not table["step"]:
            return
        print_completions(table, self.names or (), step, self.num_to_print)
        frame = pd.DataFrame(table)
        if self.folder is not None:
            self._write(frame, mode, step)
        if self.unique_prompts:
            frame = frame[~frame["prompt"].astype(str).duplicated()]
        for track in self.trackers:
            track(frame)

    def finish(self) -> None:
        """At the end of a run, wait until its files are where they belong."""
        if self.repo is not None:
            self.repo.finish()

    def state(self) -> np.ndarray:
        """For `restore`: what is kept, as JSON in UTF-8, uint8; values of other kinds as their text."""
        kept = {mode: list(rows) for mode, rows in self._rows.items()}
        return np.frombuffer(json.dumps(kept, default=str).encode(), np.uint8)

    def restore(self, state: np.ndarray) -> None:
        """Keep what a `state` has."""
        for mode, rows in json.loads(state.tobytes()).items():
            self._rows[mode] = deque(rows, maxlen=self.size)

    def _write(self, frame: pd.DataFrame, mode: Mode, step: int) -> None:
        if self.folder.is_symlink():
            logger.warning("%s is a link, which is not followed: completions are not written to files.", self.folder)
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{'eval_' if mode == 'eval' else ''}completions_{step:05d}.parquet"
        with replacing(path) as beside:
            frame.to_parquet(beside)
        if self.repo is not None:
            self.repo(path)


def trackers(report_to: Sequence[str]) -> list[Callable[[pd.DataFrame], None]]:
    """The trackers among `report_to` that take tables: wandb, where a run is open, and trackio."""
    return [_TRACKERS[name] for name in ("wandb", "trackio") if name in report_to]


def _wandb(frame: pd.DataFrame) -> None:
    import wandb

    if wandb.run is not None:
        wandb.log({"completions": wandb.Table(dataframe=frame)})


def _trackio(frame: pd.DataFrame) -> None:
    import trackio

    trackio.log({"completions": trackio.Table(dataframe=frame)})


_TRACKERS = {"wandb": _wandb, "trackio": _trackio}
