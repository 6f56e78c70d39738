"""The same run with TRL and trl_jax on real pairs: the differences of their curves, and their costs."""

from __future__ import annotations

import importlib
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import common

SIDES = ("trl", "trl_jax")
EXACT = "trl, float64"


def main() -> None:
    args = _arguments()
    common.prepare(args.cpus)
    with tempfile.TemporaryDirectory() as folder:
        runs, weights = measure(args, Path(folder))
    gaps = deviations(runs["trl"], runs["trl_jax"])
    costs = {side: run["costs"] for side, run in runs.items()}
    rows = [{"figure": name} | {side: costs[side][name] for side in runs} for name in costs["trl"]]
    for side in SIDES if EXACT in runs else ():
        print(f"{side} from TRL in float64; final weights {apart(weights[side])}:")
        common.show(deviations(runs[EXACT], runs[side]))
    print(f"{runs['trl']['steps']} steps; largest deviation from TRL:")
    common.show(gaps)
    print(f"final weights {apart(weights['both'])}; the mark is 2e-4")
    print("\ncosts as observed:")
    common.show(rows)
    report = {"deviations": gaps, "weights": weights, "runs": runs, "options": vars(args)}
    common.write_json(args.json, report)


def _arguments():
    options = common.parser(__doc__)
    options.add_argument("--data", type=Path, required=True, help="jsonl of chosen and rejected texts")
    options.add_argument("--model", type=Path, help="checkpoint; unset, a tiny llama is built")
    options.add_argument("--pairs", type=int, default=2000, help="train on the first so many pairs")
    options.add_argument("--eval", type=int, default=312, help="evaluate on the last so many, or 0")
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--epochs", type=float, default=1.0)
    options.add_argument("--max_steps", type=int, default=-1)
    options.add_argument("--max_length", type=int, default=1024, help="longer pairs are left out")
    options.add_argument("--learning_rate", type=float, default=1e-4)
    options.add_argument("--seed", type=int, default=42)
    options.add_argument("--remat_policy", default="auto", help="of trl_jax: what the backward pass keeps")
    options.add_argument("--exact", action="store_true", help="also run TRL in float64: how far is each from it")
    return options.parse_args()


def apart(furthest: tuple[float, str]) -> str:
    return f"at most {furthest[0]:.3g} apart, in {furthest[1]}"


def measure(args: Any, folder: Path) -> tuple[dict[str, dict], dict[str, tuple[float, str]]]:
    """The run of each side, and the largest differences of final weights: between the sides, and of each from the
    float64 run."""
    model = args.model
    if model is None:
        model = folder / "tiny"
        common.in_child(build_tiny, model, args.data)
    config = {
        "per_device_train_batch_size": args.batch, "per_device_eval_batch_size": args.batch,
        "num_train_epochs": args.epochs, "max_steps": args.max_steps, "max_length": args.max_length,
        "learning_rate": args.learning_rate, "seed": args.seed, "logging_steps": 1, "bf16": False,
        "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    runs = {
        side: common.in_child(train, side, model, args.data, args.pairs, args.eval, folder / side, config | extra)
        for side, extra in zip(SIDES, ({}, {"remat_policy": args.remat_policy}), strict=True)
    }
    if args.exact:
        exact_folder = folder / "exact"
        runs[EXACT] = common.in_child(train, "trl", model, args.data, args.pairs, args.eval, exact_folder, config, True)
    final = {side: folder / side / "final" for side in SIDES}
    weights = {"both": common.in_child(furthest_weights, *final.values())}
    for side in SIDES if args.exact else ():
        weights[side] = common.in_child(furthest_weights, folder / "exact" / "final", final[side])
    return runs, weights


def build_tiny(folder: Path, data: Path) -> None:
    """Write a llama with four layers of width 128, and train a tokenizer on the data."""
    texts = [row[side] for row in common.read_rows(data) for side in ("chosen", "rejected")]
    common.build_tokenizer(folder, texts, vocab_size=8192)
    common.build_llama(folder, layers=4, width=128, vocab_size=8192)


def train(
    side: str, model: Path, data: Path, pairs: int, held_out: int, out: Path, config: dict, double: bool = False
) -> dict:
    """Run one side from import to saving, in float64 if `double`, and measure everything that the process does."""
    start, before = time.perf_counter(), common.memory()
    from compat_tests.parity.reference import in_float64

    package = importlib.import_module(side)
    trainer_class, config_class = package.RewardTrainer, package.RewardConfig
    imported, after_import = time.perf_counter(), common.memory()

    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self):
            self.times = []

        def on_log(self, args, state, control, logs, **kwargs):
            if "loss" in logs:
                self.times.append(time.perf_counter())

    rows, clock = common.read_rows(data), Clock()
    trainer = trainer_class(
        model=in_float64(model, config["seed"]) if double else str(model),
        args=config_class(output_dir=str(out), **config),
        train_dataset=Dataset.from_list(rows[:pairs]),
        eval_dataset=Dataset.from_list(rows[-held_out:]) if held_out else None,
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    built = time.perf_counter()
    trainer.train()
    trained = time.perf_counter()
    if held_out:
        trainer.evaluate()
    evaluated, peak = time.perf_counter(), common.memory()
    trainer.save_model(str(out / "final"))
    steps = [later - earlier for earlier, later in zip(clock.times, clock.times[1:], strict=False)]
    costs = {
        "import s": imported - start, "read, tokenize and load s": built - imported,
        "train() to first step s": clock.times[0] - built, "process to first step s": clock.times[0] - start,
        "train s": trained - built, "evaluate s": evaluated - trained, "step s": common.spread(steps),
        "train after first step, steps/s": len(steps) / sum(steps), "memory after import MB": after_import,
        "peak memory MB": peak, "interpreter alone MB": before,
    }  # fmt: skip
    logs = trainer.state.log_history
    return {"costs": costs, "logs": logs, "steps": len(clock.times), "step_seconds": steps}


def furthest_weights(theirs: Path, ours: Path) -> tuple[float, str]:
    """The largest difference of any element between two checkpoints, and its tensor."""
    import numpy as np

    from compat_tests.parity.reference import read_weights

    ours, theirs = read_weights(ours), read_weights(theirs)
    if sorted(ours) != sorted(theirs):
        raise ValueError(f"tensors on one side only: {sorted(set(ours) ^ set(theirs))}")
    return max((float(np.max(np.abs(ours[name] - theirs[name]))), name) for name in ours)


def deviations(theirs_run: dict, ours_run: dict) -> list[dict]:
    """For each logged key: the largest absolute deviation, its step, the value there, and the tests' tolerance."""
    from compat_tests.parity.marks import Marks, allowed, timeless

    rows: dict[str, dict] = {}
    for theirs, ours in zip(theirs_run["logs"], ours_run["logs"], strict=True):
        step = theirs["step"]
        theirs, ours = timeless(theirs), timeless(ours)
        for key, value in theirs.items():
            gap, mark = abs(ours[key] - value), allowed(key, value, Marks())
            row = rows.setdefault(key, {"key": key, "largest": -1.0, "at step": step, "beyond mark": 0})
            row["beyond mark"] += gap > mark
            if gap > row["largest"]:
                row |= {"largest": float(gap), "at step": step, "value": value, "mark": mark}
    return list(rows.values())


if __name__ == "__main__":
    main()
