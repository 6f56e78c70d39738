"""One picture of a run that writes its own completions: reward, length, entropy and divergence over its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_jax.core.files.curves import Curve, points_of, svg
from trl_jax.core.files.whole_file import write_whole

FILE = "training.svg"
_PANELS = {
    "reward": "mean reward",
    "completions/mean_length": "tokens of a completion, mean",
    "entropy": "entropy, nats a token",
    "kl": "divergence from the reference, nats a token",
}
_COLORS = {"": "#1f6feb", "eval_": "#1a7f37"}  # of training, and of evaluations


def write_picture(folder: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Draw what was logged so far into `training.svg`; nothing before there is a reward.

    Args:
        history: the logs, as `state.log_history`.
    """
    panels = {}
    for name, title in _PANELS.items():
        curves = [Curve(color, points_of(history, kind + name)) for kind, color in _COLORS.items()]
        if any(curve.points for curve in curves):
            panels[title + (" (green: evaluations)" if all(curve.points for curve in curves) else "")] = curves
    if panels:
        write_whole(folder / FILE, svg(panels))
