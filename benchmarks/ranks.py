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

    start, settings = time.time(), CONFIG | {"per_device_train_batch_size": 8 // count} | config
    results = launch(whose, folder, out, config=[settings] * count, seconds=1800)
    for number, (code, text) in enumerate(results):
        if code:
            sys.exit(f"{whose}, process {number} of {count}: exit code {code}\n{text[-4000:]}")
    print(f"{whose}, {count} processes: {time.time() - start:.0f} s", file=sys.stderr, flush=True)


def left(logs: Path, folder: Path):
    """Read the log and the weights of a finished run or a checkpoint."""
    from compat_tests.parity.reference import Run, read_weights

    log = json.loads(logs.read_text())
    return Run(log["log_history"] if isinstance(log, dict) else log, folder, read_weights(folder))


def row(name: str, run, reference) -> None:
    print(f"| {name} | {' | '.join(f'{gap:.1e}' for gap in gaps(run, reference).values())} |", flush=True)


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

    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny.tiny_model(Path(scratch) / "model", args.model)
        quarter, out = args.steps // 4, Path(scratch) / "0"
        their_config = {"max_steps": args.steps, "pairs": args.pairs}
        our_config = their_config | {"save_strategy": "steps", "save_steps": quarter, "batch_layout": args.layout}
        run("trl", folder, out, args.count, **their_config)
        run("ours", folder, out, args.count, mesh_shape=args.mesh.format(count=args.count), **our_config)
        reference = left(out / "trl.json", out / "trl" / "final")
        ours, name = left(out / "ours.json", out / "ours" / "final"), f"{args.count}"
        columns = gaps(ours, reference)
        print(f"| processes | {' | '.join(columns)} |\n|{' --- |' * (1 + len(columns))}")
        if args.pairs % PAIRS == 0:
            single = Path(scratch) / "one"
            run("trl", folder, single, 1, **their_config)
            row("TRL's one", left(single / "trl.json", single / "trl" / "final"), reference)
        row(name, ours, reference)
        for turn, count in enumerate((args.count // 2, 1, args.count), start=1):
            previous, out, name = out, Path(scratch) / str(turn), f"{name}, then {count}"
            resume = str(previous / "ours" / f"checkpoint-{turn * quarter}")
            run("ours", folder, out, count, mesh_shape=f"data:{count}", resume=resume, **our_config)
            last = out / "ours" / f"checkpoint-{args.steps}"
            row(name, left(last / "trainer_state.json", last), reference)


if __name__ == "__main__":
    main()
