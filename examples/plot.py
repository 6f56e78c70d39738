"""Plot curves as SVG and as text, without dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Curve(NamedTuple):
    """A curve with points (step, value), ordered by step, and the limits `low` and `high` of the vertical axis."""

    title: str
    points: Sequence[tuple[float, float]]
    low: float
    high: float
    color: str = "#1f6feb"


WIDTH, HEIGHT, MARGIN = 640, 220, 48
STYLE = """<style>
  rect { fill: #ffffff } text { fill: #1f2328 } line { stroke: #d0d7de }
  @media (prefers-color-scheme: dark) { rect { fill: #0d1117 } text { fill: #f0f6fc } line { stroke: #3d444d } }
</style>"""


def write_svg(path: str | Path, curves: Sequence[Curve]) -> Path:
    """Draw each curve in its own panel, stacked vertically."""
    panels = [_panel(curve, index * HEIGHT) for index, curve in enumerate(curves)]
    size = f'width="{WIDTH}" height="{HEIGHT * len(curves)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    background = '<rect width="100%" height="100%"/>'
    path = Path(path)
    path.write_text("\n".join([head, STYLE, background, *panels, "</svg>"]) + "\n", encoding="utf-8")
    return path


def _panel(curve: Curve, top: float) -> str:
    last = curve.points[-1][0]
    left, right, upper, lower = MARGIN, WIDTH - 16, top + 30, top + HEIGHT - 30

    def at(step: float, value: float) -> tuple[float, float]:
        share = (value - curve.low) / (curve.high - curve.low)
        return left + (right - left) * step / last, lower - (lower - upper) * min(max(share, 0.0), 1.0)

    parts = [f'<text x="{left}" y="{top + 18}" font-weight="bold">{curve.title}</text>']
    for tick in range(5):
        value = curve.low + (curve.high - curve.low) * tick / 4
        y = at(0, value)[1]
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        x, step = left + (right - left) * tick / 4, last * tick / 4
        parts.append(f'<text x="{x:.1f}" y="{lower + 18}" text-anchor="middle">{step:.0f}</text>')
    line = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in curve.points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{curve.color}" stroke-width="2"/>')
    dots = [at(*point) for point in curve.points]
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{curve.color}"/>' for x, y in dots]
    return "\n".join(parts)


def text_plot(curve: Curve, width: int = 56, height: int = 9) -> str:
    """Plot the curve as text, in `height` lines of `width` characters."""
    last = curve.points[-1][0]
    grid = [[" "] * width for _ in range(height)]
    for step, value in curve.points:
        share = min(max((value - curve.low) / (curve.high - curve.low), 0.0), 1.0)
        grid[round((1 - share) * (height - 1))][round(step / last * (width - 1))] = "*"
    values = [curve.high - (curve.high - curve.low) * row / (height - 1) for row in range(height)]
    lines = [f"{value:5.2f} |{''.join(row)}" for value, row in zip(values, grid, strict=True)]
    axis = f"{'':5} +{'-' * width}"
    steps = f"{'':7}0{f'step {last:.0f}':>{width - 1}}"
    return "\n".join([curve.title, *lines, axis, steps])
