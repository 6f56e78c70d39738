"""Training speed of trl_jax, TRL, google-tunix and EasyDeL. Trainers in separate processes alternate.

All train the same qwen3 with random weights on the same conversations, pairs or prompts of hh-rlhf, in the same order,
in float32, with the same AdamW, schedule and clipping. Steps cycle through --batches batches, so all shapes are
compiled during the warm-up. Tunix leaves the padded lengths to its caller: "fixed" pads all texts to --max_length, as
its examples do (in DPO half of it for the prompt and half for the answer, in GRPO a quarter for the prompt); "in 128s"
pads each batch to its longest text, rounded up to a multiple of 128. Longer rows are left out for all trainers.

GRPO uses Tunix's default loss (`loss_type="grpo"` in TRL) and no reference. TRL and trl_jax generate the same
completions, Tunix different ones; nearly all have --completion tokens, because the model has random weights.

EasyDeL also pads all texts to --max_length, and the prompts of GRPO to a quarter of it. It uses its "sdpa" attention
and, in GRPO, its compiled generation loop instead of its engine eSurge. It computes a reference even without a KL term.

Tunix and EasyDeL need their own environments with a different jax: --python and --easydel are their interpreters. If
unset, an environment is created in a temporary folder with pip, which downloads about a gigabyte.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common, lanes, peer_turns, sft_turns, turns

TUNIX = ("google-tunix==0.1.7",)
EASYDEL = ("easydel==0.3.0", "pillow", "torch==2.13.0")  # torch is needed to read the weights
TASKS = ("SFT", "DPO", "GRPO")
ARMS = ("TRL", "trl_jax", "Tunix fixed", "Tunix in 128s", "EasyDeL")
ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    args = _arguments()
    common.prepare(args.cpus)
    report: dict[str, Any] = {"options": vars(args)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
        pythons = {
            library: python or _environment(folder / library, packages)
            for library, python, packages in (("Tunix", args.python, TUNIX), ("EasyDeL", args.easydel, EASYDEL))
            if any(arm.startswith(library) for arm in args.arms)
        }
        model = folder / "qwen3"
        common.in_child(sft_turns.build_model, model, args.data, args.layers, args.width, turns.VOCABULARY, "qwen3")
        for task in args.tasks:
            size = args.prompts if task == "GRPO" else args.batch
            rows = common.in_child(peer_turns.rows, task, model, args.data, args.batches * size, args.max_length)
            print(f"{task}: {size} rows a step, {args.steps} steps measured", flush=True)
            report[task] = _raced(args, task, rows, model, folder, pythons)
            common.show(report[task])
    common.write_json(args.json, report)


def _arguments() -> Any:
    options = common.parser(__doc__)
    options.add_argument("--data", type=Path, required=True, help="jsonl of chosen and rejected dialogues")
    options.add_argument("--python", type=Path, help=f"interpreter of an environment with {TUNIX[0]}")
    options.add_argument("--easydel", type=Path, help=f"interpreter of an environment with {', '.join(EASYDEL)}")
    options.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    options.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--width", type=int, default=256, help="a multiple of 64")
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--batches", type=int, default=1, help="different batches")
    options.add_argument("--max_length", type=int, default=1024)
    options.add_argument("--prompts", type=int, default=4, help="of a step of GRPO")
    options.add_argument("--completions", type=int, default=8, help="of each prompt")
    options.add_argument("--completion", type=int, default=128, help="most tokens of a completion")
    options.add_argument("--segment", type=int, default=1, help="steps a turn")
    lanes.add_steps(options, warm_up=2, steps=5)
    return options.parse_args()


def _environment(folder: Path, packages: Sequence[str]) -> Path:
    """Create an environment with these packages and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def _raced(
    args: Any, task: str, rows: list[dict], model: Path, folder: Path, pythons: dict[str, Path]
) -> list[dict[str, Any]]:
    started, stop = [], args.warm_up + args.steps
    for name in args.arms:
        config = _config(name, task, args, folder)
        if name.startswith("Tunix"):
            with _interpreter(pythons["Tunix"]):
                pad = args.max_length if name == "Tunix fixed" else None
                work = (task, model, rows, config, pad, args.segment, stop)
                started.append(lanes.start(name, peer_turns.take_tunix, *work))
        elif name == "EasyDeL":
            with _interpreter(pythons[name]):
                work = (task, model, rows, config, args.max_length, args.segment, stop)
                started.append(lanes.start(name, peer_turns.take_easydel, *work))
        else:
            side = "trl_jax" if name == "trl_jax" else "trl"
            started.append(lanes.start(name, peer_turns.take, side, task, model, rows, config, args.segment, stop))
    lanes.race(started, stop // args.segment)
    places = {lane.name: lane.facts["places"] for lane in started}
    others = [lane.name for lane in started if task == "GRPO" and lane.name.startswith(("Tunix", "EasyDeL"))]
    table = lanes.table(started, args, others)
    return [row | {"places a step": places[row["arm"]]} for row in table]


def _config(name: str, task: str, args: Any, folder: Path) -> dict[str, Any]:
    config = lanes.config_of(name, args, folder)
    if task != "GRPO":
        return config
    of_texts = ("max_length", "train_sampling_strategy")
    return {field: value for field, value in config.items() if field not in of_texts} | {
        "per_device_train_batch_size": args.prompts * args.completions, "num_generations": args.completions,
        "max_completion_length": args.completion, "loss_type": "grpo", "shuffle_dataset": False,
    }  # fmt: skip


@contextlib.contextmanager
def _interpreter(python: Path) -> Iterator[None]:
    """Processes started in this context use that interpreter, its packages, and the modules of this checkout."""
    command = [str(python), "-c", "import json, sys; print(json.dumps(sys.path[1:]))"]
    process = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
    path = sys.path.copy()
    sys.path[:] = [str(ROOT), *json.loads(process.stdout)]
    multiprocessing.set_executable(str(python))
    try:
        yield
    finally:
        multiprocessing.set_executable(sys.executable)
        sys.path[:] = path


if __name__ == "__main__":
    main()
