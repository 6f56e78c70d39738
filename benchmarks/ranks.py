"""Compare runs of several processes on one machine with the same number of TRL ranks (gloo, CPU), and resume them with
fewer and more processes.

    python -m benchmarks.ranks                # four of each; then two, one and four resume, a quarter of the run each
    python -m benchmarks.ranks --count 2 --mesh data:2 --model gemma2

Each row has a run's largest gaps to TRL's ranks over all steps and of the final weights; `benchmarks.gaps` describes
the columns. The first row compares a single TRL process with TRL's ranks, if the epoch divides evenly (in a ragged
epoch, ranks fill up the last step).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gaps import gaps

PAIRS = 16  # pairs per step
CONFIG = {"gradient_accumulation_steps": 2, "lr_scheduler_type": "constant"}


def run(whose: str, folder: Path, out: Path, count: int, **config) -> None:
    """Run `count` processes to the end, with eight pairs per micro-batch over all of them."""
    from compat_tests.mesh.launching import launch

    start, given = time.time(), CONFIG | {"per_device_train_batch_size": 8 // count} | config
    results = launch(whose, folder, out, config=[given] * count, seconds=1800)
    for number, (code, text) in enumerate(results):
        if code:
            sys.exit(f"{whose}, process {number} of {count}: exit code {code}\n{text[-4000:]}")
    print(f"{whose}, {count} processes: {time.time() - start:.0f} s", file=sys.stderr, flush=True)


def left(logs: Path, folder: Path):
    """Read the log and the weights of a finished run or a checkpoint."""
    from compat_tests.parity.reference import Run, read_weights

    found = json.loads(logs.read_text())
    return Run(found["log_history"] if isinstance(found, dict) else found, folder, read_weights(folder))


def row(name: str, mine, wanted) -> None:
    print(f"| {name} | {' | '.join(f'{gap:.1e}' for gap in gaps(mine, wanted).values())} |", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", type=int, default=4)
    options.add_argument("--model", default="llama")
    options.add_argument("--mesh", default="fsdp:{count}", help="of our processes")
    options.add_argument("--layout", default="shared")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--pairs", type=int, default=44, help="of an epoch")
    args = options.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    from compat_tests import tiny

    with tempfile.TemporaryDirectory() as made:
        folder = tiny.tiny_model(Path(made) / "model", args.model)
        quarter, out = args.steps // 4, Path(made) / "0"
        theirs = {"max_steps": args.steps, "pairs": args.pairs}
        ours = theirs | {"save_strategy": "steps", "save_steps": quarter, "batch_layout": args.layout}
        run("trl", folder, out, args.count, **theirs)
        run("ours", folder, out, args.count, mesh_shape=args.mesh.format(count=args.count), **ours)
        wanted = left(out / "trl.json", out / "trl" / "final")
        mine, name = left(out / "ours.json", out / "ours" / "final"), f"{args.count}"
        columns = gaps(mine, wanted)
        print(f"| processes | {' | '.join(columns)} |\n|{' --- |' * (1 + len(columns))}")
        if args.pairs % PAIRS == 0:
            one = Path(made) / "one"
            run("trl", folder, one, 1, **theirs)
            row("TRL's one", left(one / "trl.json", one / "trl" / "final"), wanted)
        row(name, mine, wanted)
        for turn, count in enumerate((args.count // 2, 1, args.count), start=1):
            before, out, name = out, Path(made) / str(turn), f"{name}, then {count}"
            resume = str(before / "ours" / f"checkpoint-{turn * quarter}")
            run("ours", folder, out, count, mesh_shape=f"data:{count}", resume=resume, **ours)
            last = out / "ours" / f"checkpoint-{args.steps}"
            row(name, left(last / "trainer_state.json", last), wanted)


if __name__ == "__main__":
    main()
