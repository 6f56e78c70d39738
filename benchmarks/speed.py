"""Training speed of trl_jax, in its layouts, and TRL. Trainers in separate processes alternate.

All arms train the same model on the same pairs in the same order, which is the same in each epoch. The first epoch, in
which all shapes compile, is the warm-up. After it, segments of a few steps are timed in one arm after the other. With
--warm_up and --steps, a part of a longer run is measured instead of epochs, and the run is stopped after it.
torch is hidden from trl_jax, which does not need it: transformers would otherwise import it.
"tuned" arms have no gradient checkpointing. "TRL tuned" also groups pairs by length as transformers does, so its steps
have different pairs. Therefore pairs per second are useful tokens per second divided by the mean tokens of a pair.
The first arm of trl_jax compiles programs that later arms find in the cache.
"before" is trl_jax with defaults from another checkout of the repository, --before, with that checkout's child process.
"cold" and "warm" are the seconds from a process's start to the end of its first step, without and with a compilation
cache from an earlier run.

Kinds of data: "real" are the pairs of a file; "single" are single turns with short prompts and long answers (log-normal
lengths with medians of 30 and 380 tokens); "control" are texts of one length without a common prefix, where layouts
make no difference. The last two are random tokens.
"""

from __future__ import annotations

import os
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks import common, lanes, turns
from benchmarks.lanes import Lane

NO_CHECKPOINTS = {"gradient_checkpointing": False}
ARMS = {
    "TRL as it comes": ("trl", {}),
    "TRL tuned": ("trl", NO_CHECKPOINTS),
    "trl_jax padded": ("trl_jax", {"batch_layout": "padded"}),
    "trl_jax packed": ("trl_jax", {"batch_layout": "packed"}),
    "trl_jax as it comes": ("trl_jax", {}),
    "trl_jax tuned": ("trl_jax", NO_CHECKPOINTS),
    "before": ("trl_jax", {}),
}
BEFORE = "before"
GROUPED = {"TRL tuned"}
KINDS = ["real", "single", "control"]


def main() -> None:
    args = _arguments()
    common.prepare(args.cpus)
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(folder) / "compiled")  # an empty cache
        model = args.model or Path(folder) / "small"
        if args.model is None:
            common.in_child(turns.build_small, model, args.data, args.layers, args.width)
        for kind in args.kinds:
            measured = f"{args.epochs} epochs measured"
            if args.steps is not None:
                measured = f"{args.steps} steps measured of {args.epochs} epochs"
            print(f"{kind}: {args.pairs} pairs, {args.batch} a step, {measured}", flush=True)
            raced = race(args, kind, model, Path(folder))
            report[kind] = table(raced, args)
            if args.starts:
                _add_starts(report[kind], args, kind, model, Path(folder))
            common.show(report[kind])
            report[f"{kind}_segments"] = {lane.name: lane.seconds for lane in raced}
    common.write_json(args.json, report | {"options": vars(args)})


def _arguments():
    options = common.parser(__doc__)
    lanes.add_options(options, "chosen and rejected")
    arms = [name for name in ARMS if name != BEFORE]
    options.add_argument("--arms", nargs="+", default=arms, choices=ARMS)
    options.add_argument("--before", type=Path, help='folder of the checkout that the arm "before" is of')
    options.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    options.add_argument("--starts", action="store_true", help="also measure the first step, cold and warm")
    options.add_argument("--pairs", type=int, default=64)
    options.add_argument(
        "--epochs",
        type=int,
        default=3,
        help="epochs measured, after one of warm-up; with --steps, those of the whole run",
    )
    options.add_argument("--warm_up", type=int, default=48, help="with --steps, steps before them")
    options.add_argument("--steps", type=int, help="measure so many steps of a run that is longer")
    args = options.parse_args()
    if (BEFORE in args.arms) != (args.before is not None):
        options.error(f'--before {args.before} and --arms {" ".join(args.arms)}: "before" needs both or neither')
    return args


def race(args: Any, kind: str, model: Path, folder: Path) -> list[Lane]:
    """Build all arms one after the other, then run all segments."""
    started = [_start(name, args, kind, model, folder) for name in args.arms]
    warm, steps = window(args, started[0].facts)
    if warm % args.segment or steps % args.segment:
        raise ValueError(f"--segment {args.segment} does not divide {warm} steps of warm-up and {steps} after them.")
    lanes.race(started, (warm + steps) // args.segment)
    return started


def window(args: Any, facts: dict) -> tuple[int, int]:
    """The numbers of warm-up steps and of measured steps."""
    epoch = len(facts["tokens"])
    return (epoch, args.epochs * epoch) if args.steps is None else (args.warm_up, args.steps)


def _start(name: str, args: Any, kind: str, model: Path, folder: Path) -> Lane:
    """Start an arm and wait until its trainer is built."""
    side, config, rows = _work(name, args, kind, folder)
    stop = None if args.steps is None else args.warm_up + args.steps
    checkout = args.before if name == BEFORE else None
    return lanes.start(name, turns.take, side, model, rows, config, args.segment, stop, checkout=checkout)


def _work(name: str, args: Any, kind: str, folder: Path) -> tuple[str, dict, dict]:
    """The package of an arm, its trainer arguments, and the arguments of `turns.dataset`."""
    side, arguments = ARMS[name]
    config = {
        "output_dir": str(folder / name), "per_device_train_batch_size": args.batch,
        "max_length": args.max_length, "num_train_epochs": args.epochs + (args.steps is None), "bf16": False,
        "train_sampling_strategy": "sequential", "use_cpu": True, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "logging_steps": args.segment, **arguments,
    }  # fmt: skip
    rows = {
        "kind": kind, "data": args.data, "pairs": args.pairs, "length": args.control_length, "batch": args.batch,
        "grouped": name in GROUPED,
    }  # fmt: skip
    return side, config, rows


def _add_starts(rows: list[dict], args: Any, kind: str, model: Path, folder: Path) -> None:
    for row in rows:
        side, config, pairs = _work(row["arm"], args, kind, folder)
        cache = folder / f"compiled {kind} {row['arm']}"
        for how in ("cold", "warm"):
            started = time.time()
            common.in_child(turns.first_step, side, model, pairs, config | {"max_steps": 1}, str(cache))
            row[f"{how} s"] = time.time() - started


def table(raced: list[Lane], args: Any) -> list[dict]:
    """A row per arm, without the warm-up. Ratios are medians over segments, which have the same pairs except for "TRL
    tuned"."""
    return [_row(lane, raced[0], args) for lane in raced]


def _row(lane: Lane, base: Lane, args: Any) -> dict:
    warm, steps = window(args, lane.facts)
    measured, theirs = (arm.seconds[warm // args.segment :] for arm in (lane, base))
    tokens, filled, places = (
        sum(islice(cycle(lane.facts[name]), warm, warm + steps)) for name in ("tokens", "filled", "places")
    )
    pair = sum(lane.facts["tokens"]) / (args.batch * len(lane.facts["tokens"]))
    return {
        "arm": lane.name,
        "step s": common.spread(seconds / args.segment for seconds in measured),
        f"times faster than {base.name}": common.spread(
            base_seconds / ours for base_seconds, ours in zip(theirs, measured, strict=True)
        ),
        "pairs/s": tokens / pair / sum(measured),
        "useful tokens/s": tokens / sum(measured),
        "places a step": places / steps,
        "padded share": 1 - filled / places,
        "shapes": lane.facts["shapes"],
        "compile s": lane.facts["compile s"],
        "first step s": lane.facts["first step s"],
        "ready s": lane.facts["ready s"],
        "peak MB": lane.facts["peak MB"],
        "loss apart": None if lane.name in GROUPED else lanes.apart(base, lane, "loss"),
        "grad_norm apart": None if lane.name in GROUPED else lanes.apart(base, lane, "grad_norm"),
    }


if __name__ == "__main__":
    main()
