"""SVG plots of training curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_WIDTH, _HEIGHT, _MARGIN, _POINTS = 640, 180, 56, 400
Points = list[tuple[float, float]]


class Curve(NamedTuple):
    """(step, value) points, and the color of the line."""

    color: str
    points: Points


class _Frame(NamedTuple):
    """The axes of a panel whose upper edge is at `top`."""

    top: float
    last: float
    low: float
    high: float

    def at(self, step: float, value: float) -> tuple[float, float]:
        """Pixel coordinates of a point."""
        share = (value - self.low) / (self.high - self.low)
        return _MARGIN + (_WIDTH - 16 - _MARGIN) * step / self.last, self.top + _HEIGHT - 28 - (_HEIGHT - 56) * share


def points_of(history: Iterable[Mapping[str, Any]], name: str) -> Points:
    """(step, value) for each log entry with a finite number called `name`, thinned out to about _POINTS points."""
    values = [(log["step"], log[name]) for log in history if isinstance(log.get(name), int | float)]
    values = [(step, value) for step, value in values if math.isfinite(value)]
    every = -(-len(values) // _POINTS) or 1
    return values[:-1:every] + values[-1:]


def svg(panels: Mapping[str, Sequence[Curve]]) -> str:
    """An SVG with one panel per title. The curves of a panel must have at least one point in total."""
    size = f'width="{_WIDTH}" height="{_HEIGHT * len(panels)}" font-family="sans-serif" font-size="12"'
    last = max(1, *(step for curves in panels.values() for curve in curves for step, _ in curve.points))
    parts = [part for place, (title, curves) in enumerate(panels.items())
             for part in _panel(title, curves, place * _HEIGHT, last)]  # fmt: skip
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', background, *parts, "</svg>"]) + "\n"


def _panel(title: str, curves: Sequence[Curve], top: float, last: float) -> list[str]:
    values = [value for curve in curves for _, value in curve.points]
    low, high = min(values), max(values)
    rest = (high - low) * 0.05 or abs(high) * 0.05 or 1.0  # center a constant curve
    frame = _Frame(top, last, low - rest, high + rest)
    parts = [f'<text x="{_MARGIN}" y="{top + 18}" font-weight="bold">{title}</text>']
    for tick in range(3):
        value, step = frame.low + (frame.high - frame.low) * tick / 2, last * tick / 2
        x, y = frame.at(step, value)
        parts += [
            f'<line x1="{_MARGIN}" x2="{_WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>',
            f'<text x="{_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>',
            f'<text x="{x:.1f}" y="{top + _HEIGHT - 10}" text-anchor="middle">{step:g}</text>',
        ]
    for color, points in (curve for curve in curves if curve.points):
        places = [frame.at(*point) for point in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in places]
    return parts
