"""Two records of a script's first steps side by side: a table, and what it comes to in one line."""

from __future__ import annotations

import math
from itertools import zip_longest
from statistics import median
from typing import Any, NamedTuple

from trl_jax.core.files.curves import Curve, points_of, svg

_SAME = 1e-3  # losses that differ by less, in parts of their size, are of one run: sums in another order
_PANELS = {"loss": "loss (grey: TRL, blue: trl_jax)", "grad_norm": "gradient norm", "reward": "reward"}
_COLORS = ("#8c959f", "#1f6feb")


class Record(NamedTuple):
    """The numbers of a script's first steps under one library.

    Attributes:
        trainer: its class. logs: the numbers of each step, with the step. seconds: of each step, the first with what
            comes before it. memory: the most that the process held, in MB. rows: token ids of the first batch.
        error: why it did not train; "" where it did.
    """

    trainer: str = ""
    logs: list[dict[str, float]] = []
    seconds: list[float] = []
    memory: float = 0.0
    rows: list[list[int]] = []
    error: str = ""


def report(theirs: Record, ours: Record) -> list[str]:
    """The lines of the comparison, the verdict last. One of the two may have an error."""
    if theirs.error or ours.error:
        side, error, record = ("TRL", theirs.error, ours) if theirs.error else ("trl_jax", ours.error, theirs)
        other = "trl_jax" if theirs.error else "TRL"
        return [*_alone(record), f"Under {side} it does not train: {error} The numbers are {other}'s."]
    return [*_table(theirs, ours), "", *_costs(theirs, ours), "", _verdict(theirs, ours)]


def differences(theirs: Record, ours: Record) -> dict[str, float]:
    """The largest difference of each number that both logged, in parts of its size where that is above 1."""
    found: dict[str, float] = {}
    for a, b in zip(theirs.logs, ours.logs, strict=False):
        for name in (name for name in a if name in b and name != "step"):
            found[name] = max(found.get(name, 0.0), _apart(a[name], b[name]))
    return found


def first_difference(theirs: Record, ours: Record) -> str:
    """Where two runs differ first: the rows of the first batch, or a step."""
    if theirs.rows and ours.rows and theirs.rows != ours.rows:
        if sorted(theirs.rows) == sorted(ours.rows):
            return "the first batch has the same rows in another order"
        for number, (a, b) in enumerate(zip_longest(theirs.rows, ours.rows, fillvalue=[])):
            if a != b:
                place = next((at for at, both in enumerate(zip_longest(a, b)) if both[0] != both[1]), 0)
                return (
                    f"row {number} of the first batch has other tokens from place {place} on: {a[place : place + 6]} "
                    f"under TRL ({len(a)} tokens), {b[place : place + 6]} under trl_jax ({len(b)})"
                )
    for a, b in zip(theirs.logs, ours.logs, strict=False):
        if _apart(a["loss"], b["loss"]) > _SAME:
            return f"the loss of step {a['step']:.0f} is {a['loss']:.6g} under TRL and {b['loss']:.6g} under trl_jax"
    return ""


def picture(theirs: Record, ours: Record) -> str | None:
    """Loss, gradient norm and reward of both, as SVG; None where neither logged a finite number."""
    panels = {}
    for name, title in _PANELS.items():
        both = zip(_COLORS, (theirs, ours), strict=True)
        curves = [Curve(color, points_of(record.logs, name)) for color, record in both]
        if any(curve.points for curve in curves):
            panels[title] = curves
    return svg(panels) if panels else None


def _apart(a: float, b: float) -> float:
    """The difference in parts of `a`, or of 1 where that is larger; infinite where only one is NaN or infinite."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(1.0, abs(a)) if math.isfinite(a) and math.isfinite(b) else math.inf


def _table(theirs: Record, ours: Record) -> list[str]:
    head = "step  loss TRL    trl_jax     apart    grad_norm TRL  trl_jax     apart"
    lines = [f"{theirs.trainer}, step by step", head]
    for a, b in zip(theirs.logs, ours.logs, strict=False):
        parts = [f"{a['step']:4.0f}"]
        for name, wide in (("loss", 10), ("grad_norm", 13)):
            x, y = a.get(name, math.nan), b.get(name, math.nan)
            parts.append(f"{x:<{wide}.6g}  {y:<10.6g}  {_apart(x, y):<7.1e}")
        lines.append("  ".join(parts))
    others = {name: value for name, value in differences(theirs, ours).items() if name not in ("loss", "grad_norm")}
    missing = sorted({name for log in theirs.logs for name in log} - {name for log in ours.logs for name in log})
    apart = sorted(((value, name) for name, value in others.items() if value), reverse=True)
    alike = f"{len(others) - len(apart)} other numbers are equal"
    lines.append(", ".join([alike, *(f"{name} is at most {value:.1e} apart" for value, name in apart)]))
    return lines + ([f"logged by TRL alone: {', '.join(missing)}"] if missing else [])


def _costs(theirs: Record, ours: Record) -> list[str]:
    rows = [
        ("", "TRL", "trl_jax", "times"),
        ("seconds a step, median after the first", *_costs_of(_step, theirs, ours)),
        ("seconds to the first step's end", *_costs_of(lambda record: record.seconds[0], theirs, ours)),
        ("most memory, MB", *_costs_of(lambda record: record.memory, theirs, ours)),
    ]
    return [f"{name:40}{a:>10}{b:>10}{c:>8}" for name, a, b, c in rows]


def _costs_of(cost: Any, theirs: Record, ours: Record) -> tuple[str, str, str]:
    a, b = cost(theirs), cost(ours)
    return f"{a:.3g}" if a < 1e3 else f"{a:.0f}", f"{b:.3g}" if b < 1e3 else f"{b:.0f}", f"{b / a:.2f}"


def _step(record: Record) -> float:
    return median(record.seconds[1:] or record.seconds)


def _alone(record: Record) -> list[str]:
    lines = [f"{record.trainer}, step by step"]
    for log in record.logs:
        lines.append("  ".join(f"{name} {value:.6g}" for name, value in log.items() if name in ("step", *_PANELS)))
    return [*lines, f"{_step(record):.3g} s a step after the first, {record.memory:.0f} MB"]


def _verdict(theirs: Record, ours: Record) -> str:
    found = differences(theirs, ours)
    speed = _step(theirs) / _step(ours)
    faster = f"{speed:.1f}x faster" if speed >= 1 else f"{1 / speed:.1f}x slower"
    costs = f"{faster}, {ours.memory / theirs.memory:.1f}x the memory."
    where = first_difference(theirs, ours)
    if not where and len(theirs.logs) != len(ours.logs):
        where = f"TRL took {len(theirs.logs)} steps, trl_jax {len(ours.logs)}"
    if where:
        return f"Another run: {where}. {costs}"
    return f"The same run to {found['loss']:.0e} in the loss, {max(found.values()):.0e} in all numbers; {costs}"
