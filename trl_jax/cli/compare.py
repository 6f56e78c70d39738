"""`trl-jax compare`: run the first steps of a script under TRL and under trl_jax, and compare their numbers."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from trl_jax.core.curves import Curve, points_of, svg
from trl_jax.core.files import write_whole
from trl_jax.core.secrets import CleanParser, cleaned

SIDES = ("trl", "trl_jax")
_OWN_FLAGS = ("--steps", "--json", "--picture")


class Parser(CleanParser):
    def parse_args_and_config(self, argv: list[str]) -> tuple[argparse.Namespace]:
        """Parse this command's flags, before the script or right after it; what follows belongs to the script.

        A `--` ends this command's flags.
        """
        own_flags, ended, rest = self._split_own_flags(argv)
        if not rest or (rest[0].startswith("-") and not ended):
            return (self.parse_args(argv),)  # --help, or an error
        script, *flags = rest
        trailing_flags, _, flags = ([], True, flags) if ended else self._split_own_flags(flags)
        args = self.parse_args([*own_flags, *trailing_flags, "--", script])
        args.flags = flags
        return (args,)

    def _split_own_flags(self, argv: list[str]) -> tuple[list[str], bool, list[str]]:
        """Split off the command's own leading flags: those flags, whether `--` ends them, and the rest."""
        end = 0
        while end < len(argv) and argv[end].partition("=")[0] in _OWN_FLAGS:
            end += 1 if "=" in argv[end] else 2
        if end > len(argv):
            self.error(f"argument {argv[-1]}: expected one argument")
        ended = argv[end : end + 1] == ["--"]
        return argv[:end], ended, argv[end + ended :]


def make_parser(prog: str | None = None) -> Parser:
    parser = Parser(
        prog=prog,
        description="Run the first steps of a TRL script under TRL and under trl_jax with the same seed, and report "
        "how much their numbers differ, how long a step takes, and how much memory it needs.",
        epilog="The script's own flags follow the script, after the flags of this command or after `--`. Nothing is "
        "saved, evaluated, tracked or pushed, and output_dir is a temporary folder. The script ends when its first "
        "train() has taken these steps.",
    )
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default: 10)")
    parser.add_argument("--json", metavar="FILE", help="write all numbers to this file")
    parser.add_argument("--picture", metavar="FILE.svg", help="plot loss and gradient norm of both runs to this file")
    parser.add_argument("script", help="a script that imports trl or trl_jax")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="the script's own flags")
    return parser


def main(args: argparse.Namespace) -> None:
    """Print the comparison.

    Raises:
        FileNotFoundError: there is no such script.
        ValueError: --steps is below 1, or the script trains under neither library.
    """
    if not Path(args.script).is_file():
        raise FileNotFoundError(f"there is no script {args.script!r}.")
    if args.steps < 1:
        raise ValueError(f"--steps must be at least 1, got {args.steps}.")
    records = {}
    for side in SIDES:
        print(f"{args.steps} steps under {side} ...", file=sys.stderr, flush=True)
        records[side] = run(side, args.script, args.flags, args.steps)
        if records[side].error:
            print(f"{side}: {cleaned(_explained(records[side].error))}", file=sys.stderr, flush=True)
    if all(record.error for record in records.values()):
        raise ValueError(" ".join(f"{side}: {_explained(record.error)}" for side, record in records.items()))
    print("\n".join(map(cleaned, report(*records.values()))))
    if args.json:
        write_whole(Path(args.json), json.dumps({side: record._asdict() for side, record in records.items()}, indent=2))
    if args.picture:
        image = picture(*records.values())
        if image is None:
            print(f"{args.picture} was not written: neither run logged a finite number.", file=sys.stderr)
        else:
            write_whole(Path(args.picture), image)


def run(side: str, script: str, flags: list[str], steps: int) -> Record:
    """Run the script's first steps in a separate process."""
    with tempfile.TemporaryDirectory(prefix="trl-jax-compare-") as folder:
        out = Path(folder) / "record.json"
        command = [sys.executable, "-m", "trl_jax.cli.compare_child", side, str(out), str(steps), script, *flags]
        env = {**os.environ, "WANDB_MODE": "disabled"}
        process = subprocess.run(command, capture_output=True, text=True, env=env)
        if out.is_file():
            return Record(**json.loads(out.read_text(encoding="utf-8")))
    lines = [line.strip() for line in (process.stderr or process.stdout).splitlines() if line.strip()]
    message = cleaned(lines[-1]) if lines else f"the script exited with status {process.returncode} before it trained"
    return Record(error=message if process.returncode else "the script ended without calling train()")


# Comparison of two records

_SAME = 1e-3  # relative; a smaller difference of losses is rounding, from sums in a different order
_PANELS = {"loss": "loss (gray: TRL, blue: trl_jax)", "grad_norm": "gradient norm", "reward": "reward"}
_COLORS = ("#8c959f", "#1f6feb")


class Record(NamedTuple):
    """The numbers of a script's first steps under one library.

    Attributes:
        trainer: name of its class.
        logs: the logged numbers of each step, and the step.
        seconds: duration of each step; the first includes setup.
        memory: peak memory of the process, in MB.
        rows: token ids of the first batch.
        error: why it did not train; "" if it did.
    """

    trainer: str = ""
    logs: list[dict[str, float]] = []
    seconds: list[float] = []
    memory: float = 0.0
    rows: list[list[int]] = []
    error: str = ""


def report(theirs: Record, ours: Record) -> list[str]:
    """The lines of the comparison, the verdict last. At most one of the two has an error."""
    if theirs.error or ours.error:
        side, error, record = ("TRL", theirs.error, ours) if theirs.error else ("trl_jax", ours.error, theirs)
        other_side = "trl_jax" if theirs.error else "TRL"
        return [
            *_single_run_lines(record),
            f"The script does not train under {side}: {_explained(error)} The numbers are from {other_side}.",
        ]
    return [*_step_table(theirs, ours), "", *_cost_table(theirs, ours), "", _verdict(theirs, ours)]


def _explained(error: str) -> str:
    """The error as a sentence, with the way out if trl is not installed."""
    way = " `pip install trl` installs it, with torch." if error.endswith("No module named 'trl'") else ""
    return f"{error.rstrip('.')}.{way}"


def differences(theirs: Record, ours: Record) -> dict[str, float]:
    """The largest difference of each number that both logged; relative if the number is above 1, else absolute."""
    largest: dict[str, float] = {}
    for a, b in zip(theirs.logs, ours.logs, strict=False):
        for name in (name for name in a if name in b and name != "step"):
            largest[name] = max(largest.get(name, 0.0), _relative_difference(a[name], b[name]))
    return largest


def first_difference(theirs: Record, ours: Record) -> str:
    """Where two runs first differ: in the rows of the first batch, or at a step. "" if they do not."""
    if theirs.rows and ours.rows and theirs.rows != ours.rows:
        if sorted(theirs.rows) == sorted(ours.rows):
            return "the first batch has the same rows in a different order"
        for number, (a, b) in enumerate(zip_longest(theirs.rows, ours.rows, fillvalue=[])):
            if a != b:
                position = next((index for index, both in enumerate(zip_longest(a, b)) if both[0] != both[1]), 0)
                return (
                    f"row {number} of the first batch has different tokens from position {position} on: "
                    f"{a[position : position + 6]} under TRL ({len(a)} tokens), "
                    f"{b[position : position + 6]} under trl_jax ({len(b)})"
                )
    for a, b in zip(theirs.logs, ours.logs, strict=False):
        if _relative_difference(a["loss"], b["loss"]) > _SAME:
            return f"the loss of step {a['step']:.0f} is {a['loss']:.6g} under TRL and {b['loss']:.6g} under trl_jax"
    return ""


def picture(theirs: Record, ours: Record) -> str | None:
    """Loss, gradient norm and reward of both as SVG; None if neither logged a finite number."""
    panels = {}
    for name, title in _PANELS.items():
        both = zip(_COLORS, (theirs, ours), strict=True)
        curves = [Curve(color, points_of(record.logs, name)) for color, record in both]
        if any(curve.points for curve in curves):
            panels[title] = curves
    return svg(panels) if panels else None


def _relative_difference(a: float, b: float) -> float:
    """|a - b| / max(1, |a|); infinite if only one of them is finite."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(1.0, abs(a)) if math.isfinite(a) and math.isfinite(b) else math.inf


def _step_table(theirs: Record, ours: Record) -> list[str]:
    head = "step  loss TRL    trl_jax     diff     grad_norm TRL  trl_jax     diff"
    lines = [f"{theirs.trainer}, step by step", head]
    for a, b in zip(theirs.logs, ours.logs, strict=False):
        parts = [f"{a['step']:4.0f}"]
        for name, width in (("loss", 10), ("grad_norm", 13)):
            x, y = a.get(name, math.nan), b.get(name, math.nan)
            parts.append(f"{x:<{width}.6g}  {y:<10.6g}  {_relative_difference(x, y):<7.1e}")
        lines.append("  ".join(parts))
    others = {name: value for name, value in differences(theirs, ours).items() if name not in ("loss", "grad_norm")}
    missing = sorted({name for log in theirs.logs for name in log} - {name for log in ours.logs for name in log})
    differing = sorted(((value, name) for name, value in others.items() if value), reverse=True)
    equal = f"{len(others) - len(differing)} other numbers are equal"
    lines.append(", ".join([equal, *(f"{name} differs by at most {value:.1e}" for value, name in differing)]))
    return lines + ([f"logged by TRL only: {', '.join(missing)}"] if missing else [])


def _cost_table(theirs: Record, ours: Record) -> list[str]:
    rows = [
        ("", "TRL", "trl_jax", "ratio"),
        ("seconds per step, median after the first", *_cost_cells(_median_step, theirs, ours)),
        ("seconds until the first step ends", *_cost_cells(lambda record: record.seconds[0], theirs, ours)),
        ("peak memory, MB", *_cost_cells(lambda record: record.memory, theirs, ours)),
    ]
    return [f"{name:40}{a:>10}{b:>10}{c:>8}" for name, a, b, c in rows]


def _cost_cells(cost: Any, theirs: Record, ours: Record) -> tuple[str, str, str]:
    a, b = cost(theirs), cost(ours)
    return f"{a:.3g}" if a < 1e3 else f"{a:.0f}", f"{b:.3g}" if b < 1e3 else f"{b:.0f}", f"{b / a:.2f}"


def _median_step(record: Record) -> float:
    return median(record.seconds[1:] or record.seconds)


def _single_run_lines(record: Record) -> list[str]:
    lines = [f"{record.trainer}, step by step"]
    for log in record.logs:
        lines.append("  ".join(f"{name} {value:.6g}" for name, value in log.items() if name in ("step", *_PANELS)))
    return [*lines, f"{_median_step(record):.3g} s per step after the first, {record.memory:.0f} MB"]


def _verdict(theirs: Record, ours: Record) -> str:
    largest = differences(theirs, ours)
    speed = _median_step(theirs) / _median_step(ours)
    faster = f"{speed:.1f}x faster" if speed >= 1 else f"{1 / speed:.1f}x slower"
    costs = f"{faster}, {ours.memory / theirs.memory:.1f}x the memory."
    difference = first_difference(theirs, ours)
    if not difference and len(theirs.logs) != len(ours.logs):
        difference = f"TRL took {len(theirs.logs)} steps, trl_jax {len(ours.logs)}"
    if difference:
        return f"The runs differ: {difference}. {costs}"
    loss, number = largest["loss"], max(largest.values())
    return f"The runs agree: the loss to {loss:.0e}, all logged numbers to {number:.0e}; {costs}"
