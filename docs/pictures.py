"""Draw the figures of docs/pages from the tables there: python docs/pictures.py"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

PAGES = Path(__file__).parent / "pages"
_STYLE = """<style>
  .page { fill: #ffffff; stroke: #d0d7de } .text { fill: #1f2328 } .soft { fill: #59636e }
  .theirs { fill: #8c959f } .ours { fill: #0969da } .name { fill: #ffffff } .grid { stroke: #d0d7de }
  .line { fill: none; stroke-width: 2 } .line.theirs { stroke: #8c959f } .line.ours { stroke: #0969da }
  .line.limit { stroke: #1f2328; stroke-dasharray: 5 4 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; stroke: #3d444d } .text { fill: #f0f6fc } .soft { fill: #9198a1 }
    .theirs { fill: #656c76 } .ours { fill: #1f6feb } .grid { stroke: #3d444d }
    .line { fill: none } .line.theirs { stroke: #656c76 } .line.ours { stroke: #1f6feb } .line.limit { stroke: #f0f6fc }
  }
</style>"""
_LEFT, _LONGEST = 160, 560  # left edge of the bars; length of the longest
_FIRST, _RIGHT = 64, 784  # left and right edge of the folders


def table(page: str, heading: str) -> list[dict[str, str]]:
    """The first table below a heading of a page, one dict per row."""
    text = (PAGES / page).read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1]
    lines = text.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("|"))
    names, _, *rows = [_cells(line) for line in lines[start : lines.index("", start)]]
    return [dict(zip(names, row, strict=True)) for row in rows]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def speed() -> str:
    """SVG: pairs per second, one bar per row of the table on real pairs."""
    rows = [(row["setup"], float(row["pairs/s"])) for row in table("performance.md", "Real pairs")]
    scale = _LONGEST / max(value for _, value in rows)
    parts = []
    for number, (name, value) in enumerate(rows):
        y, kind = 64 + 40 * number, "ours" if name.startswith("trl_jax") else "theirs"
        width = value * scale
        parts += [
            f'<text class="text" x="{_LEFT - 12}" y="{y + 19}" text-anchor="end">{name}</text>',
            f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{width:.1f}" height="28" rx="3"/>',
            f'<text class="text" x="{_LEFT + width + 10:.1f}" y="{y + 19}">{value:.2f}</text>',
        ]
    told = "hh-rlhf, a llama with 8 layers, two CPU cores, float32"
    return _page(64 + 40 * len(rows) + 12, "Pairs per second", told, parts)


def generation() -> str:
    """SVG: tokens per second of each generator against the completions generated at once, both axes logarithmic."""
    rows = [{name: _number(cell) for name, cell in row.items()} for row in table("generation.md", "Speed")]
    grows, *sides = rows[0]
    parts = _panel(rows, grows, dict(zip(sides, ("theirs", "ours", "limit"), strict=True)), _FIRST, _RIGHT - 180)
    return _page(400, "Tokens per second", "a llama with 8 layers, one CPU core, float32", parts)


def cost() -> str:
    """SVG: seconds per fine-tuning step against the vocabulary and against the length, all axes logarithmic."""
    rows, parts = table("performance.md", "Vocabulary and length"), []
    kinds, middle = {"TRL": "theirs", "trl_jax": "ours"}, (_FIRST + _RIGHT) / 2
    for grows, first, last in (("vocabulary", _FIRST, middle - 90), ("length", middle + 20, _RIGHT - 70)):
        own = [row for row in rows if row["grows"] == grows]
        measured = [{grows: _number(row["to"])} | {side: _number(row[side]) for side in kinds} for row in own]
        parts += _panel(measured, grows, kinds, first, last)
    return _page(400, "Seconds per step", "fine-tuning on 8 rows, one CPU core, float32", parts)


def _number(cell: str) -> float:
    return float(cell.split()[0].replace(",", ""))


def _panel(rows: list[dict[str, float]], grows: str, kinds: dict[str, str], first: float, last: float) -> list[str]:
    """One line per column of `kinds` against the column `grows`, between the x positions `first` and `last`."""
    x_of = _logarithmic([row[grows] for row in rows], first + 40, last - 40)
    y_of = _logarithmic([row[side] for row in rows for side in kinds], 330, 80)
    parts = [f'<text class="soft" x="{first + 40:.0f}" y="384">{grows}</text>']
    for row in rows:
        x, size = x_of(row[grows]), row[grows]
        parts.append(f'<path class="grid" d="M{x:.1f} 60V340"/>')
        parts.append(f'<text class="soft" x="{x:.1f}" y="360" text-anchor="middle">{size:,.0f}</text>')
    for side, kind in kinds.items():
        parts += _line([(x_of(row[grows]), y_of(row[side]), row[side]) for row in rows], side, kind)
    return parts


def _line(
    points: list[tuple[float, float, float]],
    name: str,
    kind: str,
    digits: int = 1,
    shift: float = 0.0,
    inside: bool = False,
) -> list[str]:
    """A line through points (x, y, value), labeled with its first value and, `shift` pixels lower, its last and name.

    Args:
        inside: whether other lines pass on the left of its first point, whose label is then on the right.
    """
    (first_x, first_y, first), (last_x, last_y, last) = points[0], points[-1]
    rises = points[1][1] < first_y
    first_y, last_y = first_y + 5, last_y + 5 + shift
    label = f'x="{first_x - 8:.1f}" y="{first_y:.1f}" text-anchor="end"'
    if inside:
        label = f'x="{first_x + 8:.1f}" y="{first_y + (12 if rises else -12):.1f}"'
    through = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    key = "" if kind == "limit" else f'<tspan class="{kind}">&#9679;</tspan> '  # a dashed line needs no color
    return [
        f'<polyline class="line {kind}" points="{through}"/>',
        f'<text class="soft" {label}>{_told(first, digits)}</text>',
        f'<text class="text" x="{last_x + 10:.1f}" y="{last_y:.1f}">{key}{_told(last, digits)} {name}</text>',
    ]


def _told(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if value < 100 else f"{value:,.0f}"


def _logarithmic(values: list[float], low: float, high: float) -> Callable[[float], float]:
    """A logarithmic scale that maps the smallest value to `low` and the largest to `high`."""
    least, span = math.log(min(values)), math.log(max(values) / min(values))
    return lambda value: low + (high - low) * (math.log(value) - least) / span


def folders() -> str:
    """SVG: the folders of the package by layer, the topmost layer first."""
    layers: dict[int, list[str]] = {}
    for row in table("architecture.md", "Folders"):
        layers.setdefault(int(row["layer"]), []).append(row["folder"].strip("`"))
    parts = []
    for number, layer in enumerate(sorted(layers, reverse=True)):
        y, width = 60 + 44 * number, (_RIGHT - _FIRST) / len(layers[layer])
        parts.append(f'<text class="soft" x="{_FIRST - 16}" y="{y + 23}" text-anchor="end">{layer}</text>')
        for place, folder in enumerate(layers[layer]):
            x = _FIRST + place * width
            parts += [
                f'<rect class="ours" x="{x:.1f}" y="{y}" width="{width - 8:.1f}" height="36" rx="4"/>',
                f'<text class="name" x="{x + (width - 8) / 2:.1f}" y="{y + 23}" text-anchor="middle">{folder}</text>',
            ]
    return _page(60 + 44 * len(layers) + 8, "Folders by layer", "imports only point down", parts)


def results_grpo() -> str:
    """SVG: the rewards of the run with GRPO."""
    return _curves("GRPO on sums", "Reward", "mean of sampled answers")


def results_sft() -> str:
    """SVG: the losses of the run with SFT."""
    return _curves("SFT with LoRA on a format", "Loss", "nats per token")


def results_dpo() -> str:
    """SVG: the margins of the run with DPO."""
    return _curves("DPO on pairs", "Reward margin", "chosen minus rejected")


def results_distillation() -> str:
    """SVG: the losses of the run with distillation."""
    return _curves("Distillation into fewer layers", "Forward KL from the teacher", "nats per token")


def _curves(heading: str, title: str, told: str) -> str:
    """SVG: the second and third column of a table of results.md, training and held out, against the step. A column
    whose name ends with ", TRL" is dashed and has no label, because it covers the line of trl_jax."""
    rows = [list(row.items()) for row in table("results.md", heading)]
    last, kinds = float(rows[-1][0][1]), {1: "theirs", 2: "ours"}
    of_trl = [column for column, (name, _) in enumerate(rows[0]) if name.endswith(", TRL")]
    lines = {}
    for column, kind in (kinds | dict.fromkeys(of_trl, "limit")).items():
        name = rows[0][column][0]
        lines[name, kind] = [(float(row[0][1]), float(row[column][1])) for row in rows if row[column][1] != "-"]
    most = max(value for points in lines.values() for _, value in points)
    first, right, low = _FIRST + 40, _RIGHT - 228, 330.0
    parts = [f'<path class="grid" d="M{first} 330H{right}"/>', f'<text class="soft" x="{first}" y="384">step</text>']
    for row in rows:
        x = first + (right - first) * float(row[0][1]) / last
        parts.append(f'<path class="grid" d="M{x:.1f} 60V340"/>')
        parts.append(f'<text class="soft" x="{x:.1f}" y="360" text-anchor="middle">{row[0][1]}</text>')
    ends = [points[-1][1] for (_, kind), points in lines.items() if kind != "limit"]
    for (name, kind), points in lines.items():
        shift = 0.0 if max(ends) - min(ends) > most / 12 else 9.0 if points[-1][1] == min(ends) else -9.0
        places = [(first + (right - first) * x / last, low - (low - 80) * y / most, y) for x, y in points]
        drawn = _line(places, name, kind, digits=2, shift=shift, inside=points[0][0] > 0)
        parts += drawn[:1] if kind == "limit" else drawn
    return _page(400, title, f"{told}; dashed: the same run under TRL" if of_trl else told, parts)


def _page(height: int, title: str, told: str, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {height}" font-size="15" role="img" '
        "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\">\n"
        f'{_STYLE}\n<rect class="page" x="0.5" y="0.5" width="799" height="{height - 1}" rx="10"/>\n'
        f'<text class="text" x="24" y="36" font-weight="600">{title} '
        f'<tspan class="soft" font-weight="400">{told}</tspan></text>'
    )
    return "\n".join([head, *parts, "</svg>", ""])


if __name__ == "__main__":
    for draw in (cost, folders, generation, results_distillation, results_dpo, results_grpo, results_sft, speed):
        (PAGES / "images" / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")
