"""Speed of supervised fine-tuning with trl_jax and TRL. Trainers in separate processes alternate.

All arms train the same model on the same rows in the same order. After --warm_up steps, in which shapes compile,
segments of a few steps are timed in one arm after the other. Arms that pack have different steps, so speeds are
compared in text tokens per second. "tuned" and "packed" arms have no gradient checkpointing. "chats" are the
conversations of a file of chosen texts, as messages; "control" are rows of random ids of one length, where layouts make
no difference.

--vocabularies and --lengths measure CPU seconds per step and peak memory on the control for growing vocabularies or row
lengths, with each run on its own.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import common, lanes, sft_turns
from benchmarks.lanes import Lane

_TUNED = {"gradient_checkpointing": False}
_PACKED = {"packing": True, "packing_strategy": "bfd"}
ARMS = {
    "TRL as it comes": ("trl", {}),
    "TRL tuned": ("trl", _TUNED),
    "TRL packed": ("trl", _TUNED | _PACKED),
    "trl_jax as it comes": ("trl_jax", {}),
    "trl_jax tuned": ("trl_jax", _TUNED),
    "trl_jax packed": ("trl_jax", _TUNED | _PACKED),
}
_PACKS = [name for name in ARMS if "packed" in name]


def main() -> None:
    args = _arguments()
    common.prepare(args.cpus)
    report: dict[str, Any] = {"options": vars(args)}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(folder) / "compiled")
        model = args.model or _model(args, Path(folder), sft_turns.turns.VOCABULARY)
        for kind in args.kinds:
            print(f"{kind}: {args.batch} rows a step, {args.steps} steps measured", flush=True)
            report[kind] = lanes.table(_race(args, kind, model, Path(folder)), args, _PACKS)
            common.show(report[kind])
        for grows in ("vocabularies", "lengths"):
            if sizes := vars(args)[grows]:
                report[grows] = _alone(args, Path(folder), grows, sizes)
                common.show(report[grows])
    common.write_json(args.json, report)


def _arguments() -> Any:
    options = common.parser(__doc__)
    lanes.add_options(options, "chosen")
    lanes.add_steps(options, warm_up=12, steps=24)
    options.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    options.add_argument("--kinds", nargs="*", default=["chats", "control"], choices=["chats", "control"])
    options.add_argument("--model_type", default="llama", choices=("llama", *sft_turns.LAYER_TYPES))
    options.add_argument("--vocabularies", nargs="*", type=int, default=[], help="sizes, as 49152 151936")
    options.add_argument("--lengths", nargs="*", type=int, default=[], help="tokens of every row, as 128 1024")
    return options.parse_args()


def _model(args: Any, folder: Path, vocabulary: int) -> Path:
    model = folder / f"{args.model_type} {vocabulary}"
    common.in_child(sft_turns.build_model, model, args.data, args.layers, args.width, vocabulary, args.model_type)
    return model


def _work(name: str, args: Any, kind: str, folder: Path) -> tuple[str, dict, dict]:
    """The package of an arm, its trainer arguments, and the arguments of `sft_turns.dataset`."""
    side, arguments = ARMS[name]
    # A packed step consumes several times as many rows.
    count = (args.warm_up + args.steps) * args.batch * (6 if "packing" in arguments else 1)
    config = lanes.config_of(name, args, folder) | arguments
    return side, config, {"kind": kind, "data": args.data, "count": count, "length": args.control_length}


def _race(args: Any, kind: str, model: Path, folder: Path) -> list[Lane]:
    """Build all arms one after the other, then run all segments."""
    started, stop = [], args.warm_up + args.steps
    for name in args.arms:
        side, config, rows = _work(name, args, kind, folder)
        started.append(lanes.start(name, sft_turns.take, side, model, rows, config, args.segment, stop))
    lanes.race(started, stop // args.segment)
    return started


def _alone(args: Any, folder: Path, grows: str, sizes: list[int]) -> list[dict]:
    table = []
    for size in sizes:
        model = _model(args, folder, size if grows == "vocabularies" else sft_turns.turns.VOCABULARY)
        length = {"length": size} if grows == "lengths" else {}
        for name in ("TRL as it comes", "trl_jax as it comes"):
            side, config, rows = _work(name, args, "control", folder)
            config["max_length"] = max(config["max_length"], *length.values(), 0)
            measured = common.in_child(sft_turns.peak, side, model, rows | length, config)
            table.append({grows: size, "arm": name} | measured)
    return table


if __name__ == "__main__":
    main()
