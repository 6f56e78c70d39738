"""Training speed of trl_jax and TRL on one GPU: the shapes of Qwen3-0.6B and Llama-3.1-8B, bfloat16.

Trainers in separate processes share the GPU and alternate every few steps, as in `sft`. They are all built and compiled
at the same time, so `first step s` is measured on a busy machine. Values of `--works`:

chats     SFT on the conversations of the data, 16 per step
pairs     a reward model on the pairs of the data, 8 per step
long      SFT on 4 rows of 2,048 random ids, where layouts make no difference
lora      the same with LoRA on all linear layers of Llama-3.1-8B in bfloat16
grpo      8 completions of at most 128 tokens for each of 8 prompts of 256 tokens, and the training step

"tuned" means without gradient checkpointing. "text by text" views the texts of packed rows as rows for attention, as on
GPUs before Hopper. "layer by layer" generates completions as for small models on CPUs. Model FLOPs are 6 per weight of
a linear layer and text token (4 if only an adapter is trained), plus causal attention; `MFU` is their fraction of the
GPU's peak. With `--traces`, one more segment of trl_jax is profiled, and its most expensive kernels are written to that
folder.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import accelerator_turns, common, lanes

_TUNED = {"gradient_checkpointing": False}
ARMS = {
    "TRL as it comes": ("trl", {}, None),
    "TRL tuned": ("trl", _TUNED, None),
    "trl_jax as it comes": ("trl_jax", {}, None),
    "trl_jax tuned": ("trl_jax", _TUNED, None),
    "trl_jax text by text": ("trl_jax", {}, accelerator_turns.text_by_text),
    "trl_jax layer by layer": ("trl_jax", {}, accelerator_turns.layer_by_layer),
}


def main() -> None:
    args = _arguments()
    accelerator_turns.prepare(args.device, args.share)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        kinds = {accelerator_turns.WORKS[work].model for work in args.works}
        models = {kind: (args.models or folder) / kind for kind in kinds}
        for kind, model in models.items():
            if not (model / "config.json").is_file():
                common.in_child(accelerator_turns.build_model, model, args.data, f"{args.prefix}{kind}")
        arms = [(work, name) for work in args.works for name in args.arms]
        started = _started(arms, args, models, folder)
        started = _raced(started, args.warm_up + args.turns + 1)  # the last segment is the profiled one
    rows = [row for work in args.works for row in _rows(work, started, args)]
    common.show(rows)
    common.write_json(args.json, {"options": vars(args), "rows": rows, "facts": [lane.facts for lane in started]})


def _arguments() -> Any:
    options = common.parser(__doc__)
    options.add_argument("--data", type=Path, required=True, help="jsonl of chosen and rejected texts")
    options.add_argument("--works", nargs="+", default=["chats", "pairs"], choices=accelerator_turns.WORKS)
    options.add_argument("--arms", nargs="+", default=["TRL as it comes", "trl_jax as it comes"], choices=ARMS)
    options.add_argument("--models", type=Path, help="folder where models are, or are left for the next time")
    options.add_argument("--warm_up", type=int, default=2, help="turns that are not measured")
    options.add_argument("--turns", type=int, default=4, help="turns that are measured")
    options.add_argument("--share", type=float, default=0.22, help="of the GPU's memory, for each process of trl_jax")
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options.add_argument("--prefix", default="", choices=("", "tiny-"), help="of the models, to try the command")
    options.add_argument("--traces", type=Path, help="folder for the profiles")
    return options.parse_args()


def _started(arms: list[tuple[str, str]], args: Any, models: dict, folder: Path) -> list[lanes.Lane]:
    """Start all arms; their trainers are built concurrently."""
    waiting = []
    for work, name in arms:
        side, config, change = ARMS[name]
        config = config | {"output_dir": str(folder / f"{work} {name}")}
        trace = None if args.traces is None or side == "trl" else args.traces / f"{work} {name}.json"
        model, turns = models[accelerator_turns.WORKS[work].model], args.warm_up + args.turns + 1
        pipe = lanes.begin(accelerator_turns.take, side, work, model, turns, args, config, change, trace)
        waiting.append((f"{work}: {name}", pipe))
    started = []
    for name, pipe in waiting:
        try:
            started.append(lanes.Lane(name, pipe, pipe.recv()))
        except EOFError:
            print(f"{name} did not start", flush=True)
    return started


def _raced(started: list[lanes.Lane], segments: int) -> list[lanes.Lane]:
    """As `lanes.race`, but an arm that fails does not stop the others. Returns the arms that finished."""
    for segment in range(segments):
        for lane in list(started) if segment % 2 == 0 else started[::-1]:
            try:
                lane.turn()
                print(f"{lane.name}: turn {segment}, {lane.seconds[-1]:.2f} s", flush=True)
                if segment == segments - 1:
                    lane.facts |= lane.pipe.recv()
            except EOFError:
                print(f"{lane.name} ended at turn {segment}", flush=True)
                started = [running for running in started if running is not lane]
    return started


def _rows(work: str, started: list[lanes.Lane], args: Any) -> list[dict[str, Any]]:
    """The table of one work, a row per arm; ratios are computed per segment."""
    arms = [lane for lane in started if lane.name.startswith(f"{work}:")]
    segment = accelerator_turns.WORKS[work].segment
    if not arms:
        return []
    rates = [lanes.rates_of(lane, args.warm_up)[:-1] for lane in arms]
    return [
        {
            "arm": lane.name,
            "ms a step": common.spread(1e3 * seconds / segment for seconds in lane.seconds[args.warm_up : -1]),
            "tokens/s": common.spread(rate),
            "times": common.spread(ours / base for ours, base in zip(rate, rates[0], strict=True)),
            "MFU": median(rate) * lane.facts["flops"] / accelerator_turns.PEAK,
            "device GB": lane.facts["device GB"],
            "first step s": lane.facts["first step s"],
            "compile s": lane.facts["compile s"],
            "loss apart": lanes.apart(arms[0], lane, "loss"),
            "losses": [round(entry["loss"], 5) for entry in lane.facts["logs"]],
        }
        for lane, rate in zip(arms, rates, strict=True)
    ]


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
