"""How fast trl_jax fine-tunes a language model, against TRL: live trainers in processes of their own, taking turns.

Every arm trains the same model on the same rows in the same order. After --warm_up steps, in which shapes compile, each
segment of a few steps is timed in one arm after the other; arms that pack have other steps, so what compares is tokens
of text a second. TRL tuned has no gradient checkpointing. "chats" are the conversations of a file of chosen texts as
messages, "control" rows of random ids of one length, where no layout can win anything.

--vocabularies measures steps and peaks of memory of further vocabularies on the control, each run alone.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from compat_tests.bench import common, sft_turns

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


@dataclass
class Lane:
    """One arm's process; `seconds` of each of its segments."""

    name: str
    pipe: Connection
    facts: dict[str, Any]
    seconds: list[float] = field(default_factory=list)


def main() -> None:
    args = _arguments()
    common.prepare(args.cpus)
    report: dict[str, Any] = {"options": vars(args)}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(folder) / "compiled")
        model = args.model or _model(args, Path(folder), sft_turns.turns.VOCABULARY)
        for kind in args.kinds:
            print(f"{kind}: {args.batch} rows a step, {args.steps} steps measured", flush=True)
            report[kind] = _table(_race(args, kind, model, Path(folder)), args)
            common.show(report[kind])
        if args.vocabularies:
            report["vocabularies"] = _vocabularies(args, Path(folder))
            common.show(report["vocabularies"])
    common.write_json(args.json, report)


def _arguments() -> Any:
    options = common.parser(__doc__)
    options.add_argument("--data", type=Path, required=True, help="jsonl of chosen texts")
    options.add_argument("--model", type=Path, help="checkpoint; unset, a llama of --layers and --width")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--width", type=int, default=256, help="a multiple of 64")
    options.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    options.add_argument("--kinds", nargs="*", default=["chats", "control"], choices=["chats", "control"])
    options.add_argument("--vocabularies", nargs="*", type=int, default=[], help="sizes, as 49152 151936")
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--warm_up", type=int, default=12)
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--segment", type=int, default=4, help="steps a turn")
    options.add_argument("--max_length", type=int, default=1024)
    options.add_argument("--control_length", type=int, default=256)
    return options.parse_args()


def _model(args: Any, folder: Path, vocabulary: int) -> Path:
    model = folder / f"llama {vocabulary}"
    common.in_child(sft_turns.build_model, model, args.data, args.layers, args.width, vocabulary)
    return model


def _work(name: str, args: Any, kind: str, folder: Path) -> tuple[str, dict, dict]:
    """Whose trainer an arm is, its configuration, and what `sft_turns.dataset` is told."""
    side, arguments = ARMS[name]
    config = {
        "output_dir": str(folder / name), "per_device_train_batch_size": args.batch, "max_length": args.max_length,
        "max_steps": args.warm_up + args.steps, "bf16": False, "train_sampling_strategy": "sequential",
        "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": args.segment, **arguments,
    }  # fmt: skip
    # Packed steps have several rows' tokens each: rows enough for all of them.
    count = (args.warm_up + args.steps) * args.batch * (6 if "packing" in arguments else 1)
    return side, config, {"kind": kind, "data": args.data, "count": count, "length": args.control_length}


def _race(args: Any, kind: str, model: Path, folder: Path) -> list[Lane]:
    """Build all arms one after the other, then run every segment in each, the first to go changing."""
    lanes, context = [], get_context("spawn")
    for name in args.arms:
        side, config, rows = _work(name, args, kind, folder)
        here, there = context.Pipe()
        work = (there, side, model, rows, config, args.segment, args.warm_up + args.steps)
        context.Process(target=sft_turns.take, args=work, daemon=True).start()
        there.close()
        lanes.append(Lane(name, here, here.recv()))
    for segment in range((args.warm_up + args.steps) // args.segment):
        first = segment % len(lanes)
        for lane in lanes[first:] + lanes[:first]:
            lane.pipe.send("go")
            lane.seconds.append(lane.pipe.recv())
    for lane in lanes:
        lane.facts |= lane.pipe.recv()
    return lanes


def _table(lanes: list[Lane], args: Any) -> list[dict]:
    rates = {lane.name: _rates(lane, args) for lane in lanes}
    base = lanes[0]
    return [
        {
            "arm": lane.name,
            "step s": common.spread(seconds / args.segment for seconds in lane.seconds[args.warm_up // args.segment :]),
            "tokens/s": common.spread(rates[lane.name]),
            f"times {base.name}": common.spread(
                own / other for own, other in zip(rates[lane.name], rates[base.name], strict=True)
            ),
            "compile s": lane.facts["compile s"],
            "first step s": lane.facts["first step s"],
            "peak MB": lane.facts["peak MB"],
            "loss apart": None if "packed" in lane.name else _apart(base, lane),
        }
        for lane in lanes
    ]


def _rates(lane: Lane, args: Any) -> list[float]:
    """Tokens of text a second of each measured segment, by the trainer's own count."""
    totals = [entry["num_tokens"] for entry in lane.facts["logs"]]
    tokens = [after - before for before, after in zip([0, *totals], totals, strict=False)]
    warm = args.warm_up // args.segment
    return [count / seconds for count, seconds in zip(tokens[warm:], lane.seconds[warm:], strict=True)]


def _apart(base: Lane, lane: Lane) -> float:
    pairs = zip(base.facts["logs"], lane.facts["logs"], strict=True)
    return max(abs(theirs["loss"] - ours["loss"]) for theirs, ours in pairs)


def _vocabularies(args: Any, folder: Path) -> list[dict]:
    found = []
    for size in args.vocabularies:
        model = _model(args, folder, size)
        for name in ("TRL as it comes", "trl_jax as it comes"):
            side, config, rows = _work(name, args, "control", folder)
            found.append({"vocabulary": size, "arm": name} | common.in_child(sft_turns.peak, side, model, rows, config))
    return found


if __name__ == "__main__":
    main()
