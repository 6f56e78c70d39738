"""One picture of a run that writes its own completions: reward, length, entropy and divergence over its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trl_jax.core.files.whole_file import write_whole

FILE = "training.svg"
_PANELS = {
    "reward": "mean reward",
    "completions/mean_length": "tokens of a completion, mean",
    "entropy": "entropy, nats a token",
    "kl": "divergence from the reference, nats a token",
}
_WIDTH, _HEIGHT, _MARGIN, _POINTS = 640, 180, 56, 400
_COLORS = {"": "#1f6feb", "eval_": "#1a7f37"}  # of training, and of evaluations
Points = list[tuple[float, float]]


class _Frame(NamedTuple):
    """The numbers at the edges of a panel whose upper end is at `top`."""

    top: float
    last: float
    low: float
    high: float

    def at(self, step: float, value: float) -> tuple[float, float]:
        """Where a point lies."""
        share = (value - self.low) / (self.high - self.low)
        return _MARGIN + (_WIDTH - 16 - _MARGIN) * step / self.last, self.top + _HEIGHT - 28 - (_HEIGHT - 56) * share


def write_picture(folder: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Draw what was logged so far into `training.svg`; nothing before there is a reward.

    Args:
        history: the logs, as `state.log_history`.
    """
    found = {name: {kind: _points(history, kind + name) for kind in _COLORS} for name in _PANELS}
    shown = [name for name, of in found.items() if any(of.values())]
    if shown:
        write_whole(folder / FILE, _svg({name: found[name] for name in shown}))


def _points(history: Sequence[Mapping[str, Any]], name: str) -> Points:
    """(step, value) of each log that has one, at most about _POINTS of them."""
    values = [(log["step"], log[name]) for log in history if isinstance(log.get(name), int | float)]
    values = [(step, value) for step, value in values if math.isfinite(value)]
    every = -(-len(values) // _POINTS) or 1
    return values[:-1:every] + values[-1:]


def _svg(panels: Mapping[str, Mapping[str, Points]]) -> str:
    size = f'width="{_WIDTH}" height="{_HEIGHT * len(panels)}" font-family="sans-serif" font-size="12"'
    last = max(1, *(step for curves in panels.values() for points in curves.values() for step, _ in points))
    parts = [part for place, (name, curves) in enumerate(panels.items())
             for part in _panel(_PANELS[name], curves, place * _HEIGHT, last)]  # fmt: skip
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', background, *parts, "</svg>"]) + "\n"


def _panel(title: str, curves: Mapping[str, Points], top: float, last: float) -> list[str]:
    values = [value for points in curves.values() for _, value in points]
    low, high = min(values), max(values)
    rest = (high - low) * 0.05 or abs(high) * 0.05 or 1.0  # a line of equal values lies in the middle
    frame = _Frame(top, last, low - rest, high + rest)
    both = " (green: evaluations)" if all(curves.values()) else ""
    parts = [f'<text x="{_MARGIN}" y="{top + 18}" font-weight="bold">{title}{both}</text>']
    for tick in range(3):
        value, step = frame.low + (frame.high - frame.low) * tick / 2, last * tick / 2
        x, y = frame.at(step, value)
        parts += [
            f'<line x1="{_MARGIN}" x2="{_WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>',
            f'<text x="{_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>',
            f'<text x="{x:.1f}" y="{top + _HEIGHT - 10}" text-anchor="middle">{step:g}</text>',
        ]
    for kind, points in ((kind, points) for kind, points in curves.items() if points):
        places = [frame.at(*point) for point in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{_COLORS[kind]}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{_COLORS[kind]}"/>' for x, y in places]
    return parts
