"""Several real processes on the loopback beside as many ranks of TRL (gloo, CPU); fewer and more go on with the run.

    python -m compat_tests.bench.ranks                # four of each; then two, one and four go on, a quarter each
    python -m compat_tests.bench.ranks --count 2 --mesh data:2 --model gemma2

A row for each run: the largest gap of any step to TRL's ranks, and of the weights at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

CONFIG = {"gradient_accumulation_steps": 2, "lr_scheduler_type": "constant"}


def run(whose: str, folder: Path, out: Path, count: int, **config) -> None:
    """So many processes, to the end; eight pairs a micro-batch over all."""
    from compat_tests.mesh.launching import launch

    start, given = time.time(), CONFIG | {"per_device_train_batch_size": 8 // count} | config
    results = launch(whose, folder, out, config=[given] * count, seconds=1800)
    for number, (code, text) in enumerate(results):
        if code:
            sys.exit(f"{whose}, process {number} of {count}: exit code {code}\n{text[-4000:]}")
    print(f"{whose}, {count} processes: {time.time() - start:.0f} s", file=sys.stderr, flush=True)


def row(name: str, logs: list[dict], weights: Path, wanted: list[dict], theirs: Path) -> None:
    from compat_tests.parity.marks import steps_of, worst
    from compat_tests.parity.reference import read_weights

    found = worst(steps_of(logs), steps_of(wanted))
    ours, other = read_weights(weights), read_weights(theirs)
    found["weights"] = max(abs(ours[tensor] - other[tensor]).max() for tensor in other)
    keys = ("loss", "grad_norm", "mean_reward", "margin", "accuracy", "num_tokens", "weights")
    print(f"| {name} | {' | '.join(f'{found[key]:.1e}' for key in keys)} |", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", type=int, default=4)
    options.add_argument("--model", default="llama")
    options.add_argument("--mesh", default="fsdp:{count}", help="of our processes")
    options.add_argument("--layout", default="shared")
    options.add_argument("--steps", type=int, default=20)
    args = options.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    from compat_tests import tiny

    with tempfile.TemporaryDirectory() as made:
        folder = tiny.tiny_model(Path(made) / "model", args.model)
        quarter, out = args.steps // 4, Path(made) / "0"
        ours = {"max_steps": args.steps, "save_strategy": "steps", "save_steps": quarter, "batch_layout": args.layout}
        run("trl", folder, out, args.count, max_steps=args.steps)
        run("ours", folder, out, args.count, mesh_shape=args.mesh.format(count=args.count), **ours)
        wanted, theirs = json.loads((out / "trl.json").read_text()), out / "trl" / "final"
        print("| processes | loss | grad_norm | mean_reward | margin | accuracy | num_tokens | weights |")
        print(f"|{' --- |' * 8}")
        name = f"{args.count}"
        row(name, json.loads((out / "ours.json").read_text()), out / "ours" / "final", wanted, theirs)
        for turn, count in enumerate((args.count // 2, 1, args.count), start=1):
            before, out, name = out, Path(made) / str(turn), f"{name}, then {count}"
            resume = str(before / "ours" / f"checkpoint-{turn * quarter}")
            run("ours", folder, out, count, mesh_shape=f"data:{count}", resume=resume, **ours)
            last = out / "ours" / f"checkpoint-{args.steps}"
            row(name, json.loads((last / "trainer_state.json").read_text())["log_history"], last, wanted, theirs)


if __name__ == "__main__":
    main()
