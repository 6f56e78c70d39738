"""Training speed of trl_jax and TRL with DPO, KTO, ORPO and CPO. Trainers alternate, as in `sft`.

"pairs" are conversations with a common prefix from a file; KTO uses one answer of each, alternately chosen and
rejected. "control" are texts of one length after prompts of one word, where layouts make no difference. "tuned" means
without gradient checkpointing. Speeds are compared in text tokens per second, as counted by the trainer.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import common, dpo_turns, lanes, turns

_TUNED = {"gradient_checkpointing": False}
ARMS = {
    "TRL as it comes": ("trl", {}),
    "TRL tuned": ("trl", _TUNED),
    "trl_jax as it comes": ("trl_jax", {}),
    "trl_jax tuned": ("trl_jax", _TUNED),
}
KINDS = ["pairs", "control"]


def main() -> None:
    args = _arguments()
    common.prepare(args.cpus)
    report: dict[str, Any] = {"options": vars(args)}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(folder) / "compiled")
        model = args.model or Path(folder) / "small"
        if args.model is None:
            common.in_child(turns.build_small, model, args.data, args.layers, args.width)
        for trainer in args.trainers:
            for kind in args.kinds:
                print(f"{trainer}, {kind}: {args.batch} rows a step, {args.steps} steps measured", flush=True)
                rows = report[f"{trainer}, {kind}"] = _raced(args, trainer, kind, model, Path(folder))
                common.show(rows)
    common.write_json(args.json, report)


def _arguments() -> Any:
    options = common.parser(__doc__)
    lanes.add_options(options, "chosen and rejected")
    lanes.add_steps(options, warm_up=12, steps=24)
    options.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    trainers = ["DPO", "KTO"]
    options.add_argument("--trainers", nargs="+", default=trainers, choices=[*trainers, *dpo_turns.REFERENCE_FREE])
    options.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    return options.parse_args()


def _raced(args: Any, trainer: str, kind: str, model: Path, folder: Path) -> list[dict[str, Any]]:
    started, stop = [], args.warm_up + args.steps
    rows = {"kind": kind, "data": args.data, "count": stop * args.batch, "length": args.control_length}
    for name in args.arms:
        side, arguments = ARMS[name]
        config = lanes.config_of(name, args, folder) | arguments
        work = (side, trainer, model, rows, config, args.segment, stop)
        started.append(lanes.start(name, dpo_turns.take, *work))
    lanes.race(started, stop // args.segment)
    return lanes.table(started, args)


if __name__ == "__main__":
    main()
