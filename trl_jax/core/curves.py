"""SVG plots of training curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_WIDTH, _HEIGHT, _RIGHT, _POINTS = 640, 180, 24, 400
_CHARACTER = 7.0  # width of a digit in pixels
_STYLE = """<style>
  rect { fill: #ffffff } text { fill: #1f2328 } line { stroke: #d0d7de }
  @media (prefers-color-scheme: dark) { rect { fill: #0d1117 } text { fill: #f0f6fc } line { stroke: #3d444d } }
</style>"""
Points = list[tuple[float, float]]


class Curve(NamedTuple):
    """(step, value) points, and the color of the line."""

    color: str
    points: Points


class _Frame(NamedTuple):
    """The axes of a panel whose upper edge is at `top`: steps from 0 to `last`, values from `low` to `high`."""

    left: float
    top: float
    last: float
    low: float
    high: float

    def at(self, step: float, value: float) -> tuple[float, float]:
        """Pixel coordinates of a point."""
        share, width = (value - self.low) / (self.high - self.low), _WIDTH - _RIGHT - self.left
        return self.left + width * step / self.last, self.top + _HEIGHT - 28 - (_HEIGHT - 56) * share


def points_of(history: Iterable[Mapping[str, Any]], name: str) -> Points:
    """(step, value) for each log entry with a finite number called `name`, thinned out to about _POINTS points."""
    values = [(log["step"], log[name]) for log in history if isinstance(log.get(name), int | float)]
    values = [(step, value) for step, value in values if math.isfinite(value)]
    stride = -(-len(values) // _POINTS) or 1
    return values[:-1:stride] + values[-1:]


def svg(panels: Mapping[str, Sequence[Curve]]) -> str:
    """An SVG with one panel per title. The curves of a panel must have at least one point in total."""
    width, height = _WIDTH, _HEIGHT * len(panels) + 20  # the label of the step axis is below the last panel
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12"'
    last = max(1, *(step for curves in panels.values() for curve in curves for step, _ in curve.points))
    scales = {title: _scale([value for curve in curves for _, value in curve.points])
              for title, curves in panels.items()}  # fmt: skip
    widest = max(len(label) for ticks in scales.values() for label in ticks.values())
    left = 14 + _CHARACTER * widest
    parts = []
    for index, (title, curves) in enumerate(panels.items()):
        ticks = scales[title]
        frame = _Frame(left, index * _HEIGHT, last, min(ticks), max(ticks))
        parts += _panel(title, curves, frame, ticks)
    middle = (left + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.1f}" y="{height - 8}" text-anchor="middle">step</text>')
    background = '<rect width="100%" height="100%"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', _STYLE, background, *parts, "</svg>"]) + "\n"


def _panel(title: str, curves: Sequence[Curve], frame: _Frame, ticks: Mapping[float, str]) -> list[str]:
    parts = [f'<text x="{frame.left}" y="{frame.top + 18}" font-weight="bold">{title}</text>']
    for value, label in ticks.items():
        _, y = frame.at(0, value)
        parts += [
            f'<line x1="{frame.left}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
            f'<text x="{frame.left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>',
        ]
    spacing = max(_step(frame.last), 1)  # steps are whole numbers
    for step, label in _with_labels(range(int(frame.last / spacing) + 1), spacing).items():
        x, _ = frame.at(step, frame.low)
        parts.append(f'<text x="{x:.1f}" y="{frame.top + _HEIGHT - 10}" text-anchor="middle">{label}</text>')
    for color, points in (curve for curve in curves if curve.points):
        pixels = [frame.at(*point) for point in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in pixels]
    return parts


def _scale(values: Sequence[float]) -> dict[float, str]:
    """Ticks at round numbers that enclose the values, with labels. Ticks are negative only if a value is."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # a constant curve: in the middle of the panel, unless it is zero
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    step = _step(high - low)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if min(values) >= 0:
        first = max(first, 0)
    return _with_labels(range(first, last + 1), step)


def _step(width: float) -> float:
    """The distance between ticks: 1, 2 or 5 times a power of ten, so that two to five intervals fit into the width."""
    power = 10.0 ** math.floor(math.log10(width / 2))
    return next(size * power for size in (5, 2, 1) if size * power <= width / 2)


def _with_labels(numbers: Iterable[int], step: float) -> dict[float, str]:
    """`number * step` with its label; all labels have as many decimals as `step` needs."""
    numbers = list(numbers)
    exponent = math.floor(math.log10(step))
    largest = max(abs(number) for number in numbers) * step
    if largest >= 1e6 or step < 1e-5:
        digits = max(0, math.floor(math.log10(largest)) - exponent)
        return {number * step: f"{number * step:.{digits}e}" if number else "0" for number in numbers}
    return {number * step: f"{number * step:,.{max(0, -exponent)}f}" for number in numbers}
