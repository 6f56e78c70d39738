"""The last completions of a run: shown as a table, written to a file, and given to trackers."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import pandas as pd
import pyarrow as pa

from trl_jax.core.files.whole_file import replacing
from trl_jax.core.printable import printable
from trl_jax.rollout.completions.repo import CompletionsRepo
from trl_jax.rollout.completions.table import print_completions

logger = logging.getLogger(__name__)
Mode = Literal["train", "eval"]
_DEPTH, _ITEMS, _BITS = 32, 100_000, 4096  # limits of one value: nesting, items in all, bits of an int
_MESSAGES = ("prompt", "completion")  # columns whose lists and dicts are written as such


@dataclass
class CompletionsLog:
    """The last completions, those of training and those of evaluations apart.

    Models and reward functions decide what is in the table, so nothing in it ends a run: what cannot be shown or
    written is a warning.

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
    _warned: set[str] = field(default_factory=set)

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
        further = {_text(name): values for name, values in (extra or {}).items()}
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            row = {"prompt": plain(prompt), "completion": plain(completion)}
            row["extra"] = {name: plain(values[number]) for name, values in further.items()}
            if self.names is not None:
                row["rewards"] = dict(zip(self.names, rewards[number].tolist(), strict=True))
                row["advantage"] = float(advantages[number])
            self._rows[mode].append(row)

    def table(self, mode: Mode, step: int) -> dict[str, list]:
        """The columns in TRL's order: step, prompt, completion, each reward, each further column, advantage.

        A further column is None for generations that did not have it. A reward is NaN for completions of a resumed run
        that were judged before the reward function had this name.
        """
        rows, judged = self._rows[mode], self.names is not None
        found = dict.fromkeys(name for row in rows for name in row["extra"])
        return {
            "step": [step] * len(rows),
            "prompt": [row["prompt"] for row in rows],
            "completion": [row["completion"] for row in rows],
            **{name: [row["rewards"].get(name, math.nan) for row in rows] for name in self.names or ()},
            **{name: [row["extra"].get(name) for row in rows] for name in found},
            **({"advantage": [row["advantage"] for row in rows]} if judged else {}),
        }

    def log(self, mode: Mode, step: int) -> None:
        """Show the table, write it to a file, and give it to the trackers; nothing without completions."""
        if not self._rows[mode]:
            return
        table = self.table(mode, step)
        with self._warning("shown"):
            print_completions(table, self.names or (), step, self.num_to_print)
        with self._warning("made"):
            self._give_away(as_frame(table), mode, step)

    def _give_away(self, frame: pd.DataFrame, mode: Mode, step: int) -> None:
        if self.folder is not None:
            with self._warning("written"):
                self._write(frame, mode, step)
        if self.unique_prompts:
            frame = frame[~frame["prompt"].astype(str).duplicated()]
        for track in self.trackers:
            with self._warning("given to a tracker"):
                track(frame)

    def finish(self) -> None:
        """At the end of a run, wait until its files are where they belong."""
        if self.repo is not None:
            with self._warning("pushed to the Hub"):
                self.repo.finish()

    @contextlib.contextmanager
    def _warning(self, what: str) -> Iterator[None]:
        """Make a warning of any error, the same one once."""
        try:
            yield
        except Exception as error:  # of rich, pandas, a tracker, a disk: training goes on without this table
            found = f"{type(error).__name__}: {printable(str(error)[:500])}"
            message = f"log_completions: the table of completions could not be {what}, and the run goes on. {found}"
            if message not in self._warned:
                self._warned.add(message)
                logger.warning(message)

    def state(self) -> np.ndarray:
        """For `restore`: what is kept, as JSON in UTF-8, uint8."""
        kept = {mode: list(rows) for mode, rows in self._rows.items()}
        return np.frombuffer(json.dumps(kept).encode(), np.uint8)

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


def plain(value: Any) -> Any:
    """A copy of a value for JSON, Arrow and a terminal: None, bool, int, float, str, lists and dicts of these.

    NumPy and JAX arrays become lists; values of other types become their text; half of a UTF-16 pair becomes its
    escape. "..." replaces a container inside itself, anything nested deeper than _DEPTH, and all beyond _ITEMS items.
    """
    left, open_containers = _ITEMS, set()

    def made(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value) if value.bit_length() <= _BITS else hex(value)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, np.generic):
            item = value.item()
            return _text(item) if isinstance(item, np.generic) else made(item, depth)
        if isinstance(value, np.ndarray | jax.Array):
            return made(np.asarray(value).tolist(), depth)
        if not isinstance(value, Mapping | list | tuple | set | frozenset):
            return _text(value)
        if id(value) in open_containers or depth > _DEPTH or left < 0:
            return "..."
        open_containers.add(id(value))
        if isinstance(value, Mapping):
            found = {_text(key): made(item, depth + 1) for key, item in islice(value.items(), left)}
        else:
            found = [made(item, depth + 1) for item in islice(value, left)]
            found += ["..."] * (len(found) < len(value))
        open_containers.discard(id(value))
        return found

    try:
        return made(value, 0)
    except Exception:  # whatever a script's own class raises
        return f"<{type(value).__name__}>"


def _text(value: Any) -> str:
    """The text of any value, encodable as UTF-8."""
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception:  # whatever a script's own class raises
        text = f"<{type(value).__name__}>"
    return str.encode(text, errors="backslashreplace").decode()


def as_frame(table: Mapping[str, list]) -> pd.DataFrame:
    """The table with columns that Parquet can hold.

    Prompts and completions keep the structure of their messages, but the arguments of tool calls become JSON text: each
    tool has its own. Other columns with lists, dicts or values of several types become JSON text as a whole.
    """
    return pd.DataFrame({name: _column(values, messages=name in _MESSAGES) for name, values in table.items()})


def _column(values: list, *, messages: bool) -> list:
    nested = any(isinstance(value, list | dict) for value in values)
    if messages and nested:
        values = [_with_text_arguments(value) for value in values]
    if messages or not nested:
        try:
            if not _has_empty_struct(pa.array(values).type):
                return values
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            pass  # values of several types, or an int of more than 64 bits
    return [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]


def _has_empty_struct(kind: pa.DataType) -> bool:
    """Whether an Arrow type has a struct without fields in it, which Parquet cannot hold."""
    if pa.types.is_struct(kind) and not kind.num_fields:
        return True
    return any(_has_empty_struct(kind.field(number).type) for number in range(kind.num_fields))


def _with_text_arguments(value: Any) -> Any:
    """Any value with `arguments` as JSON text wherever it has them in dicts and lists."""
    if isinstance(value, list):
        return [_with_text_arguments(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: json.dumps(item, ensure_ascii=False)
        if name == "arguments" and not isinstance(item, str | None)
        else _with_text_arguments(item)
        for name, item in value.items()
    }


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
