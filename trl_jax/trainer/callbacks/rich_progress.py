"""Progress of a run drawn by rich."""

from __future__ import annotations

import importlib.util
from typing import Any

from datasets import Dataset
from transformers.trainer_callback import TrainerCallback


class RichProgressCallback(TrainerCallback):
    """A bar for training, one for evaluation, and the last log as a table, live in the terminal.

    Raises:
        ImportError: rich is not installed.
    """

    def __init__(self):
        if importlib.util.find_spec("rich") is None:
            raise ImportError("RichProgressCallback draws with rich, which is not installed: pip install rich.")
        self._live: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        from rich.console import Group
        from rich.live import Live
        from rich.panel import Panel
        from rich.progress import Progress
        from rich.text import Text

        if not state.is_world_process_zero:
            return
        self._training, self._evaluation, self._evaluating = Progress(), Progress(), None
        self._steps = self._training.add_task("[blue]Training  ", total=state.max_steps, completed=state.global_step)
        self._group, self._panel = Group, Panel
        self._live = Live()
        self._live.start()
        self._show(Text("Nothing was logged yet."))

    def on_step_end(self, args, state, control, **kwargs):
        if self._live is not None:
            self._training.update(self._steps, completed=state.global_step)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if self._live is None:
            return
        if self._evaluating is None:
            total = len(eval_dataloader) if isinstance(eval_dataloader.dataset, Dataset) else None
            self._evaluating = self._evaluation.add_task("[blue]Evaluation", total=total)
        self._evaluation.advance(self._evaluating)

    def on_evaluate(self, args, state, control, **kwargs):
        if self._live is not None and self._evaluating is not None:
            self._evaluation.remove_task(self._evaluating)
            self._evaluating = None

    on_predict = on_evaluate

    def on_log(self, args, state, control, logs=None, **kwargs):
        from rich.columns import Columns

        if self._live is None:
            return
        tables = [self._table(group, values) for group, values in _grouped(logs or {}).items()]
        self._show(self._panel(Columns(tables, expand=True), title=f"[bold green]Step {state.global_step}"))

    def on_train_end(self, args, state, control, **kwargs):
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, last: Any) -> None:
        self._live.update(self._panel(self._group(self._training, self._evaluation, last)), refresh=True)

    def _table(self, group: str, values: dict[str, Any]) -> Any:
        from rich.table import Table

        table = Table("Metric", title=f"[bold blue]{group}" if group else None, header_style="bold magenta", box=None)
        table.add_column("Value", justify="right")
        for name, value in values.items():
            table.add_row(name, f"{value:.3f}" if isinstance(value, int | float) else str(value))
        return self._panel(table, border_style="cyan")


def _grouped(logs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """ "a/b": 1 under "a" as "b", names without a slash under ""."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in logs.items():
        group, slash, name = key.partition("/")
        groups.setdefault(group if slash else "", {})[name if slash else key] = value
    return groups
