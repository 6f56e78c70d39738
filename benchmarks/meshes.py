"""Compare runs on meshes of eight simulated devices with the same run on one device, and of TRL with the same global
batch. Prints the differences of all numbers as Markdown.

    python -m benchmarks.meshes                       # six models, their layouts, every mesh, 20 steps each
    python -m benchmarks.meshes --models bert --meshes data:8 --ways plain lora
    python -m benchmarks.meshes --models llama gemma2 --layouts padded packed shared --meshes sequence:2

Each run is a line on standard error and in the file of --rows. Standard output has the worst differences for each
model, layout and way, and lists everything that exceeds the parity tolerances. `benchmarks.gaps` describes the columns.
The work can be divided over several commands; `--show FILES` combines their files into one table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.mesh_runs import FACTS, PAIRS, Side, words

MODELS = ("llama", "qwen2", "gemma2", "gpt_neox", "qwen3_moe", "bert")
LAYOUTS = ("padded", "packed", "shared")
MESHES = (
    "data:2", "data:8", "fsdp:2", "fsdp:8", "data:2,fsdp:2", "data:4,fsdp:2", "tensor:2", "data:4,tensor:2",
    "fsdp:4,tensor:2", "data:2,fsdp:2,tensor:2", "zero1:8", "zero2:8", "sequence:2", "data:2,sequence:4",
    "fsdp:2,tensor:2,sequence:2",
)  # fmt: skip
YARDSTICKS = ("one device", "TRL")
BEYOND = {
    "beyond": "Beyond the marks", "below eps": "Weights beyond them whose exact first gradient is below Adam's eps"
}  # fmt: skip
WAYS = ("plain", "accumulated", "ragged", "lora")


def eight_devices() -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


def fits(model: str, layout: str, mesh: str, way: str) -> bool:
    """Whether this combination is supported. Encoders cannot share prompts, because their representation depends on the
    answer, and do not support sequence meshes; with eight shards of one pair each there is nothing to accumulate."""
    if model == "bert" and (layout == "shared" or "sequence" in mesh):
        return False
    return way != "accumulated" or words(mesh)[1] < PAIRS


def main() -> None:
    args = _options().parse_args()
    if args.show:
        report([json.loads(line) for file in args.show for line in file.read_text().splitlines()])
        return
    os.environ.setdefault("TQDM_DISABLE", "1")
    eight_devices()
    rows = []
    for row in race(args):
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        if args.rows:
            with args.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    report(rows)


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    options.add_argument("--meshes", nargs="+", default=MESHES)
    options.add_argument("--layouts", nargs="+", default=LAYOUTS, choices=LAYOUTS)
    options.add_argument("--ways", nargs="+", default=("plain",), choices=WAYS)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--rows", type=Path, help="a file that gets each run's gaps as a line of JSON")
    options.add_argument("--show", type=Path, nargs="+", help="such files, instead of runs")
    return options


def race(args: argparse.Namespace) -> Iterator[dict]:
    """The gaps of each run, with its names, seconds, and what exceeds the tolerances."""
    from compat_tests import tiny

    rows = tiny.preference_rows(PAIRS * args.steps, margin=True)
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            tiny.tiny_model(Path(folder), model, **FACTS.get(model, {}))
            side = Side(model, Path(folder), rows)
            for layout, way, mesh in itertools.product(args.layouts, args.ways, args.meshes):
                if fits(model, layout, mesh, way):
                    start, labels = time.time(), {"model": model, "layout": layout, "way": way, "mesh": mesh}
                    yield labels | side.row(mesh, layout, way) | {"seconds": round(time.time() - start)}


def report(runs: list[dict]) -> None:
    """Print the worst gaps for each model, layout and way, to one device and to TRL; then those beyond tolerances."""
    for yardstick in YARDSTICKS:
        kinds = itertools.groupby(sorted(runs, key=_kind), _kind)
        table = [(kind, [row[yardstick] for row in rows]) for kind, rows in kinds]
        columns = list(dict.fromkeys(key for _, rows in table for key in rows[0] if key not in BEYOND))
        print(f"\nFrom {yardstick}:\n")
        print(f"| model | way | layout | meshes | {' | '.join(columns)} |\n|{' --- |' * (4 + len(columns))}")
        for kind, rows in table:
            cells = [f"{max(row[key] for row in rows):.1e}" if key in rows[0] else "" for key in columns]
            print(f"| {' | '.join([*kind, str(len(rows)), *cells])} |")
    print(f"\n{len(runs)} runs on meshes.")
    for key, title in BEYOND.items():
        exceeding = [f"{row['model']} {row['layout']} {row['way']} {row['mesh']} from {yardstick}: {', '.join(names)}"
                for row in runs for yardstick in YARDSTICKS if (names := row[yardstick][key])]  # fmt: skip
        print(f"{title}: {'; '.join(exceeding) or 'none'}.")


def _kind(row: dict) -> tuple[str, str, str]:
    return row["model"], row["way"], row["layout"]


if __name__ == "__main__":
    main()
