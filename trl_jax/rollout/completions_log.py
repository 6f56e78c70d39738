"""Log completions to the terminal, trackers, disk and the Hub, and compute their metrics."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import pandas as pd
import pyarrow as pa

from trl_jax.core.curves import Curve, points_of, svg
from trl_jax.core.files import replacing, write_whole
from trl_jax.core.text import printable
from trl_jax.data.image_rows import pictures_in
from trl_jax.hub.push import Publisher, Upload
from trl_jax.hub.vision.processor import open_picture
from trl_jax.losses.policy_gradient import PolicyLoss

logger = logging.getLogger(__name__)
Mode = Literal["train", "eval"]
_DEPTH, _ITEMS, _BITS = 32, 100_000, 4096  # limits of one value: nesting, number of items, bits of an int
_MESSAGES = ("prompt", "completion")  # columns that keep lists and dicts


def without_pictures(messages: Any) -> Any:
    """Remove the images from a conversation's image parts; anything else is returned unchanged."""
    if not isinstance(messages, list):
        return messages
    stripped = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            content = [
                {"type": "image"} if isinstance(part, Mapping) and part.get("type") == "image" else part
                for part in content
            ]
            message = {**message, "content": content}
        stripped.append(message)
    return stripped


# The completions table


@dataclass
class CompletionsLog:
    """The most recent completions, kept separately for training and evaluation.

    The contents come from models and user functions, so logging is best effort: content that cannot be shown or written
    causes a warning, never an error.

    Attributes:
        names: names of the reward functions; None if completions are not scored.
        size: number of completions to keep.
        num_to_print: number of completions to print, chosen at random; None prints all.
        unique_prompts: whether trackers get each prompt only once.
        folder: folder for Parquet files (names of evaluation files start with eval_); None: no files.
        trackers: functions that take the table as a pandas DataFrame.
        repo: pushes each file to the Hub; None: no pushes.
        multimodal: whether trackers get the images of prompts. Files and checkpoints never have images.
        shows: whether the table is printed, written and sent; otherwise it only exists for scripts that read it.
    """

    names: Sequence[str] | None
    size: int
    num_to_print: int | None = None
    unique_prompts: bool = False
    folder: Path | None = None
    trackers: Sequence[Callable[[pd.DataFrame], None]] = ()
    repo: CompletionsRepo | None = None
    multimodal: bool = False
    shows: bool = True
    _column_views: dict[Mode, dict[str, Any]] = field(default_factory=dict)  # of `columns`, since the last generation
    _pictures: dict[Mode, deque[list[Any]]] = field(init=False)
    _rows: dict[Mode, deque[dict[str, Any]]] = field(init=False)
    _warned: set[str] = field(default_factory=set)

    def __post_init__(self):
        self._rows, self._pictures = (defaultdict(lambda: deque(maxlen=self.size)) for _ in range(2))

    def add(
        self,
        mode: Mode,
        prompts: list,
        completions: list,
        rewards: np.ndarray | None = None,
        advantages: np.ndarray | None = None,
        extra: Mapping[str, list] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """Add the completions of a generation.

        Args:
            rewards: `[B, F]`; None if completions are not scored.
            advantages: `[B]`; None if completions are not scored.
            extra: columns from `log_extra`, which may differ between generations.
            names: the reward functions' current names; None: as before.
        """
        self.names = self.names if names is None else names
        self._apply_script_changes(mode)
        self._column_views.pop(mode, None)
        extra_columns = {_text(name): values for name, values in (extra or {}).items()}
        for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            row = {"prompt": plain(without_pictures(prompt)), "completion": plain(without_pictures(completion))}
            row["extra"] = {name: plain(values[index]) for name, values in extra_columns.items()}
            if self.names is not None:
                row["rewards"] = dict(zip(self.names, rewards[index].tolist(), strict=True))
                row["advantage"] = float(advantages[index])
            self._rows[mode].append(row)
            self._pictures[mode].append(pictures_in(prompt) if self.multimodal and isinstance(prompt, list) else [])

    def table(self, mode: Mode, step: int) -> dict[str, list]:
        """The columns in TRL's order: step, prompt, completion, rewards, extra columns, advantage.

        An extra column is None for generations that lack it. After resuming, a reward is NaN for earlier completions if
        its reward function had a different name then.
        """
        self._apply_script_changes(mode)
        rows, has_advantages = self._rows[mode], self.names is not None
        extra_names = dict.fromkeys(name for row in rows for name in row["extra"])
        return {
            "step": [step] * len(rows),
            "prompt": [row["prompt"] for row in rows],
            "completion": [row["completion"] for row in rows],
            **{name: [row["rewards"].get(name, math.nan) for row in rows] for name in self.names or ()},
            **{name: [row["extra"].get(name) for row in rows] for name in extra_names},
            **({"advantage": [row["advantage"] for row in rows]} if has_advantages else {}),
        }

    def columns(self, mode: Mode) -> dict[str, Any]:
        """The columns in the form of TRL's `_logs`: deques of prompts, completions, advantages and the images of
        prompts, and dicts of deques for rewards and extra columns. Changes to them, except to images, appear in the
        table."""
        table, rows = self.table(mode, 0), self._rows[mode]
        extra = dict.fromkeys(name for row in rows for name in row["extra"])
        pictures = self._pictures[mode] if any(self._pictures[mode]) else ()
        self._column_views[mode] = {
            "images": self._last_values(pictures),
            "prompt": self._last_values(table["prompt"]),
            "completion": self._last_values(table["completion"]),
            "rewards": {name: self._last_values(table[name]) for name in self.names or ()},
            "advantages": self._last_values(table.get("advantage", ())),
            "extra": {name: self._last_values(table[name]) for name in extra},
        }
        return self._column_views[mode]

    def _apply_script_changes(self, mode: Mode) -> None:
        """Copy a script's changes to `columns` into the rows.

        Raises:
            ValueError: the number of values in a column differs from the number of completions.
        """
        views = self._column_views.get(mode, {})
        for name in ("prompt", "completion", "advantages", "rewards", "extra"):
            nested = name in ("rewards", "extra")
            columns = views.get(name, {}) if nested else {name: views.get(name, ())}
            for column, values in columns.items():
                if len(values) not in (0, len(self._rows[mode])):
                    raise ValueError(
                        f"_logs[{column!r}] has {len(values)} values for {len(self._rows[mode])} completions. Change "
                        "values, and add columns with log_extra in a reward function."
                    )
                for row, value in zip(self._rows[mode], values, strict=False):
                    if nested:
                        row[name][column] = plain(value)
                    else:
                        row["advantage" if column == "advantages" else column] = plain(value)

    def _last_values(self, values: Iterable[Any]) -> deque[Any]:
        return deque(values, maxlen=self.size)

    def log(self, mode: Mode, step: int) -> None:
        """Print the table, write it to a file, and send it to the trackers. Does nothing if the table is empty."""
        if not self._rows[mode] or not self.shows:
            return
        table = self.table(mode, step)
        with self._warning("shown"):
            print_completions(table, self.names or (), step, self.num_to_print)
        with self._warning("built"):
            self._save(as_frame(table), mode, step)

    def _save(self, frame: pd.DataFrame, mode: Mode, step: int) -> None:
        if self.folder is not None:
            with self._warning("written"):
                self._write(frame, mode, step)
        if any(self._pictures[mode]):
            frame = frame.assign(image=list(self._pictures[mode]))
        if self.unique_prompts:
            frame = frame[~frame["prompt"].astype(str).duplicated()]
        for track in self.trackers:
            with self._warning("sent to a tracker"):
                track(frame)

    def finish(self) -> None:
        """At the end of a run, push the remaining files and wait for the uploads."""
        if self.repo is not None:
            with self._warning("pushed to the Hub"):
                self.repo.finish()

    @contextlib.contextmanager
    def _warning(self, failed_step: str) -> Iterator[None]:
        """Turn any exception into a warning; equal warnings are only logged once."""
        try:
            yield
        except Exception as error:  # rich, pandas, a tracker or the disk failed: training continues without the table
            cause = f"{type(error).__name__}: {printable(str(error)[:500])}"
            message = f"log_completions: the completions table could not be {failed_step}; training continues. {cause}"
            if message not in self._warned:
                self._warned.add(message)
                logger.warning(message)

    def state(self) -> np.ndarray:
        """The completions for `restore`, as UTF-8 JSON in a uint8 array."""
        rows_by_mode = {mode: list(rows) for mode, rows in self._rows.items()}
        return np.frombuffer(json.dumps(rows_by_mode).encode(), np.uint8)

    def restore(self, state: np.ndarray) -> None:
        """Restore a `state`."""
        for mode, rows in json.loads(state.tobytes()).items():
            self._rows[mode] = deque(rows, maxlen=self.size)
            self._pictures[mode] = deque([[] for _ in self._rows[mode]], maxlen=self.size)

    def _write(self, frame: pd.DataFrame, mode: Mode, step: int) -> None:
        if self.folder.is_symlink():
            logger.warning("%s is a symlink and is not followed: completions are not written to files.", self.folder)
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{'eval_' if mode == 'eval' else ''}completions_{step:05d}.parquet"
        with replacing(path) as temporary:
            frame.to_parquet(temporary)
        if self.repo is not None:
            self.repo(path)


def plain(value: Any) -> Any:
    """Copy a value as plain data for JSON, Arrow and the terminal: None, bool, int, float, str, lists and dicts.

    NumPy and JAX arrays become lists, other types their `str`, and lone surrogates are escaped. "..." replaces
    containers that contain themselves, values nested deeper than _DEPTH, and everything after _ITEMS items.
    """
    items_left, open_containers = _ITEMS, set()

    def convert(value: Any, depth: int) -> Any:
        nonlocal items_left
        items_left -= 1
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value) if value.bit_length() <= _BITS else hex(value)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, np.generic):
            item = value.item()
            return _text(item) if isinstance(item, np.generic) else convert(item, depth)
        if isinstance(value, np.ndarray | jax.Array):
            return convert(np.asarray(value).tolist(), depth)
        if not isinstance(value, Mapping | list | tuple | set | frozenset):
            return _text(value)
        if id(value) in open_containers or depth > _DEPTH or items_left < 0:
            return "..."
        open_containers.add(id(value))
        if isinstance(value, Mapping):
            converted = {_text(key): convert(item, depth + 1) for key, item in islice(value.items(), items_left)}
        else:
            converted = [convert(item, depth + 1) for item in islice(value, items_left)]
            converted += ["..."] * (len(converted) < len(value))
        open_containers.discard(id(value))
        return converted

    try:
        return convert(value, 0)
    except Exception:  # a user's class may raise anything
        return f"<{type(value).__name__}>"


def _text(value: Any) -> str:
    """`str` of any value, encodable as UTF-8."""
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception:  # a user's class may raise anything
        text = f"<{type(value).__name__}>"
    return str.encode(text, errors="backslashreplace").decode()


def as_frame(table: Mapping[str, list]) -> pd.DataFrame:
    """Convert the table to a DataFrame that can be written to Parquet.

    Prompts and completions keep their messages, but the arguments of tool calls become JSON text because their fields
    differ per tool. In other columns with lists, dicts or mixed types, all values become JSON text.
    """
    return pd.DataFrame({name: _column(values, messages=name in _MESSAGES) for name, values in table.items()})


def _column(values: list, *, messages: bool) -> list:
    nested = any(isinstance(value, list | dict) for value in values)
    if messages and nested:
        values = [_with_text_arguments(value) for value in values]
    if (messages or not nested) and _fits_arrow(values):
        return values
    return [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]


def _fits_arrow(values: list) -> bool:
    """Whether Parquet can store the values unchanged: they have a single type, and ints have at most 64 bits."""
    try:
        return not _has_empty_struct(pa.array(values).type)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return False


def _has_empty_struct(kind: pa.DataType) -> bool:
    """Whether an Arrow type contains a struct without fields, which Parquet cannot store."""
    if pa.types.is_struct(kind) and not kind.num_fields:
        return True
    return any(_has_empty_struct(kind.field(index).type) for index in range(kind.num_fields))


def _with_text_arguments(value: Any) -> Any:
    """Convert every `arguments` entry in nested dicts and lists to JSON text."""
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
    """The trackers in `report_to` that take tables: wandb (if a run is open) and trackio."""
    return [_TRACKERS[name] for name in ("wandb", "trackio") if name in report_to]


def _wandb(frame: pd.DataFrame) -> None:
    import wandb

    if wandb.run is not None:
        wandb.log({"completions": wandb.Table(dataframe=_with_images(frame, wandb.Image))})


def _with_images(frame: pd.DataFrame, kind: Callable[[Any], Any]) -> pd.DataFrame:
    """The table with the images of prompts, if any, converted to the tracker's image class `kind`."""
    if "image" not in frame:
        return frame
    return frame.assign(image=[[kind(open_picture(picture)) for picture in pictures] for pictures in frame["image"]])


def _trackio(frame: pd.DataFrame) -> None:
    import trackio

    trackio.log({"completions": trackio.Table(dataframe=_with_images(frame, trackio.Image))})


_TRACKERS = {"wandb": _wandb, "trackio": _trackio}


# Push to the Hub

_SECONDS = 120  # minimum time between two commits, as in TRL: the Hub limits commits per hour
_CARD = """---
pretty_name: Completions of a training run
tags: [trl, trl_jax, trl-logs, completions]
---

# Completions of a training run

Written by trl_jax: one file per log, with the most recent completions and their prompts, rewards and advantages.
"""


class CompletionsRepo:
    """Pushes files to a dataset repository in the background, at most once per _SECONDS.

    If a push fails, a warning is logged and the files stay in the folder.

    Raises:
        PermissionError, ConnectionError: the repository cannot be opened.
    """

    def __init__(self, name: str, *, token: str | None, private: bool | None):
        self._publisher = Publisher(name, token=token, private=private, revision=None, repo_type="dataset")
        self._publisher.open()
        self._pushed_at, self._waiting = float("-inf"), []

    def __call__(self, path: Path) -> None:
        """Queue a file and push if it is time."""
        self._waiting.append(path)
        if not self._publisher.running and time.monotonic() - self._pushed_at >= _SECONDS:
            self._push()

    def finish(self) -> None:
        """Push the remaining files and wait."""
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


# Terminal table, like TRL's `print_prompt_completions_sample`

_STYLES = {"role": "bold red", "thought": "italic dim white", "image": "bold cyan", "": ""}


def print_completions(
    table: Mapping[str, list], rewards: Sequence[str], step: int, num_samples: int | None = None
) -> None:
    """Print a table of completions, if rich is installed.

    Args:
        table: columns of equal length: step, prompt, completion, one per name in `rewards`, extra columns, and an
            optional advantage.
        num_samples: number of rows to print, chosen at random. If None or not less than the number of rows, all are
            printed in order.
    """
    if importlib.util.find_spec("rich") is None or num_samples == 0:
        return
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    extra = [name for name in table if name not in ("step", "prompt", "completion", "advantage", *rewards)]
    display = Table(show_header=True, header_style="bold white", expand=True)
    display.add_column("Prompt", style="bright_yellow")
    display.add_column("Completion", style="bright_green")
    for name in rewards:
        display.add_column(Text(printable(name)), style="bold cyan", justify="right")
    number_columns = [*rewards]
    if "advantage" in table:
        number_columns.append("advantage")
        display.add_column("Advantage", style="bold magenta", justify="right")
    for name in extra:
        display.add_column(Text(printable(name)), style="bright_white")

    def cell(value: Any) -> Text:
        return Text.assemble(*((printable(text), _STYLES[kind]) for text, kind in _pieces(value)))

    for row in _sample_rows(len(table["prompt"]), num_samples):
        numbers = [f"{table[name][row]:.2f}" for name in number_columns]
        texts = [cell(table[name][row]) for name in ("prompt", "completion")]
        display.add_row(*texts, *numbers, *(cell(table[name][row]) for name in extra))
        display.add_section()
    Console().print(Panel(display, expand=False, title=f"Step {step}", border_style="bold white"))


def _sample_rows(rows: int, num_samples: int | None) -> Sequence[int]:
    """Choose rows with Python's global random generator, as in TRL."""
    if num_samples is None or num_samples >= rows:
        return range(rows)
    return random.sample(range(rows), num_samples)


def _pieces(value: Any) -> Iterator[tuple[str, str]]:
    """The text of a cell as (text, style) pieces: messages with their roles, or `str` of any other value."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        yield str(value), ""
        return
    for number, message in enumerate(value):
        yield ("\n\n" if number else "") + f"{str(message.get('role', '')).upper()}\n", "role"
        if thought := message.get("reasoning_content") or message.get("thinking"):
            yield f"{thought}\n", "thought"
        yield from _content(message.get("content"))
        calls = message.get("tool_calls") or []
        yield "\n".join(map(_call, calls if isinstance(calls, list) else [calls])), ""


def _content(content: Any) -> Iterator[tuple[str, str]]:
    """The pieces of a message's content: text and blocks as in TRL, and any other items in a list that a tool
    returned."""
    if not isinstance(content, list):
        yield "" if content is None else str(content), ""
        return
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            yield str(block.get("text", "")), ""
        elif kind == "image":
            yield "[IMAGE]", "image"
        elif not isinstance(block, dict):
            yield f"{block}\n", ""


def _call(call: Any) -> str:
    """A tool call in Python syntax; for a malformed call its `str`."""
    function = call.get("function", {}) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return str(call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if isinstance(arguments, dict):
        arguments = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"{function.get('name', '?')}({arguments})"


# Plot of the run: reward, length, entropy and KL over steps

FILE = "training.svg"
_PANELS = {
    "reward": "mean reward",
    "completions/mean_length": "mean completion length, tokens",
    "entropy": "entropy, nats per token",
    "kl": "KL from the reference, nats per token",
}
_COLORS = {"": "#1f6feb", "eval_": "#1a7f37"}  # training and evaluation


def write_picture(folder: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Plot the logs to `training.svg`. Writes nothing if none of the plotted metrics has been logged.

    Args:
        history: `state.log_history`.
    """
    panels = {}
    for name, title in _PANELS.items():
        curves = [Curve(color, points_of(history, kind + name)) for kind, color in _COLORS.items()]
        if any(curve.points for curve in curves):
            panels[title + (" (green: evaluation)" if all(curve.points for curve in curves) else "")] = curves
    if panels:
        write_whole(folder / FILE, svg(panels))


# Metrics, with TRL's names and order


class MetricLog:
    """Metric values by name since the last log, in the order in which names first appeared.

    prefix: of the names in logs.
    values: always the same dict, which scripts may keep and change.
    """

    def __init__(self, prefix: str = ""):
        self.prefix = prefix
        self.values: dict[str, list[float]] = defaultdict(list)

    def add(self, metrics: Iterable[tuple[str, float]]) -> None:
        for name, value in metrics:
            self.values[name].append(value)

    def extend(self, metrics: Mapping[str, list[float]], *, first: bool = False) -> None:
        """Add lists of values; with `first`, before all other names."""
        earlier = dict(self.values) if first else {}
        if first:
            self.values.clear()
        for name, values in metrics.items():
            if name in earlier:
                self.values[name] = earlier.pop(name)
                self.values[name][:0] = values
            else:
                self.values[name].extend(values)
        self.values.update(earlier)

    def set(self, name: str, value: float) -> None:
        """Set a metric; only its last value is logged."""
        self.values[name] = [value]

    def means(self) -> dict[str, float | None]:
        """The mean of each metric's non-NaN values; None if there is none."""
        numbers = {name: [value for value in values if not math.isnan(value)] for name, values in self.values.items()}
        return {name: sum(values) / len(values) if values else None for name, values in numbers.items()}

    def take(self) -> dict[str, float | None]:
        """Return the means, and clear the values."""
        means = self.means()
        self.values.clear()
        return means

    def copied(self) -> dict[str, list[float]]:
        """A copy of the values, for `restore`."""
        return {name: [*values] for name, values in self.values.items()}

    def restore(self, values: Mapping[str, list[float]]) -> None:
        """Replace all values by those that were copied."""
        self.values.clear()
        self.extend(values)


def length_metrics(lengths: Sequence[int], truncated: np.ndarray) -> Iterator[tuple[str, float]]:
    """Length metrics of completions.

    Args:
        lengths: number of tokens of each completion.
        truncated: bool `[B]`.
    """
    lengths = np.asarray(lengths, np.float32)
    yield from _spread("completions", "length", lengths)
    yield "completions/clipped_ratio", float(np.mean(truncated, dtype=np.float32))
    terminated = lengths[~truncated]
    yield from _spread("completions", "terminated_length", terminated if len(terminated) else np.zeros(1, np.float32))


def _spread(group: str, name: str, values: np.ndarray) -> Iterator[tuple[str, float]]:
    for kind, function in (("mean", np.mean), ("min", np.min), ("max", np.max)):
        yield f"{group}/{kind}_{name}", float(function(values))


def reward_metrics(names: Sequence[str], rewards: np.ndarray, advantages: Any) -> Iterator[tuple[str, float]]:
    """Reward metrics.

    Args:
        names: names of the F reward functions.
        rewards: float32 `[B, F]`.
        advantages: the `Advantages` computed from them.
    """
    for name, values in zip(names, rewards.T, strict=True):
        yield f"rewards/{name}/mean", _mean(values)
        yield f"rewards/{name}/std", _std(values)
    yield "reward", _mean(advantages.rewards)
    yield "reward_std", _std(advantages.rewards)
    yield "frac_reward_zero_std", float(np.mean(advantages.zero_std, dtype=np.float32))


def group_reward_metrics(
    names: Sequence[str], rewards: np.ndarray, advantages: Any, group: int
) -> Iterator[tuple[str, float]]:
    """Reward metrics under the names of TRL's AsyncGRPO.

    Args:
        names, rewards, advantages: as for `reward_metrics`.
        group: completions per prompt. `reward_std` is the mean over groups of the population standard deviation
            (ddof=0).
    """
    yield "reward", _mean(advantages.rewards)
    groups = [row[~np.isnan(row)] for row in np.asarray(advantages.rewards).reshape(-1, group)]
    yield "reward_std", _mean(np.asarray([rewards.std() if len(rewards) else np.nan for rewards in groups]))
    for name, values in zip(names, rewards.T, strict=True):
        yield f"rewards/{name}", _mean(values)


def sampling_metrics(
    settings: PolicyLoss,
    policy_logps: Sequence[np.ndarray],
    sampling_logps: Sequence[np.ndarray],
    completion_mask: Sequence[np.ndarray],
) -> Iterator[tuple[str, float]]:
    """The differences between the sampler's log-probabilities and the policy's, and the importance ratios in the loss.

    Tokens without a log-probability from the sampler (NaN) are left out of the differences and have the ratio 1.

    Args:
        policy_logps, sampling_logps: log-probabilities of each completion's tokens.
    """
    completions = zip(policy_logps, sampling_logps, completion_mask, strict=True)
    log_ratios = [(policy - sampler)[mask] for policy, sampler, mask in completions]
    differences = np.abs(np.concatenate(log_ratios))
    differences = differences[~np.isnan(differences)]
    for kind, function in (("mean", np.mean), ("max", np.max)):
        yield f"sampling/sampling_logp_difference/{kind}", float(function(differences)) if len(differences) else 0.0
    rows = [np.nan_to_num(row, nan=0.0) for row in log_ratios]
    log_ratio = np.asarray([row.sum() for row in rows]) if settings.corrects_sequences else np.concatenate(rows)
    ratio = settings.bounded(np.exp(log_ratio.astype(np.float32)))
    for kind, function in (("min", np.min), ("mean", np.mean), ("max", np.max)):
        yield f"sampling/importance_sampling_ratio/{kind}", float(function(ratio)) if len(ratio) else 0.0


def _mean(values: np.ndarray) -> float:
    real = values[~np.isnan(values)]
    return float(real.mean()) if len(real) else math.nan


def _std(values: np.ndarray) -> float:
    """Sample standard deviation (ddof=1) of the non-NaN values. NaN for fewer than two values; infinite if a value is,
    as in TRL."""
    real = values[~np.isnan(values)]
    if len(real) < 2:
        return math.nan
    with np.errstate(invalid="ignore"):
        squares = np.square(real - real.mean())
    squares = squares[~np.isnan(squares)]
    return float(np.sqrt(squares.mean() * (len(real) / (len(real) - 1)))) if len(squares) else math.nan
