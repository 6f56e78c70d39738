"""How fast trl_jax trains on one GPU, against TRL on the same one: Qwen3-0.6B's and Llama-3.1-8B's shapes, bfloat16.

Live trainers in processes of their own share the GPU and take turns of a few steps, as in `sft`; all are built and
compile at the same time, so `first step s` is of a busy machine. `--works` says what is trained:

chats     SFT on the conversations of the data, 16 a step
pairs     a reward model of the data's pairs, 8 a step
long      SFT on 4 rows of 2,048 random ids, where no layout can win anything
lora      the same with LoRA on all maps of Llama-3.1-8B, whose weights are bfloat16
grpo      8 completions of at most 128 tokens of each of 8 prompts of 256, and the step on them

TRL tuned and trl_jax tuned have no gradient checkpointing; "text by text" lays the texts of packed rows out as rows for
attention alone, as on GPUs before Hopper; "layer by layer" writes completions as those of small models on CPUs. Model
FLOPs are 6 for each weight of a map and token of text (4 where only an adapter trains) and attention's on half of the
square; their share of what the GPU can do is `MFU`. One more segment of trl_jax is profiled, if `--traces` names a
folder: its dearest kernels go there.
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
    """All arms, built at the same time."""
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
    """Every segment in each arm, as `lanes.race`; those that came to their end. One that fails takes no other along."""
    for segment in range(segments):
        for lane in list(started) if segment % 2 == 0 else started[::-1]:
            try:
                lane.turn()
                print(f"{lane.name}: turn {segment}, {lane.seconds[-1]:.2f} s", flush=True)
                if segment == segments - 1:
                    lane.facts |= lane.pipe.recv()
            except EOFError:
                print(f"{lane.name} ended at turn {segment}", flush=True)
                started = [other for other in started if other is not lane]
    return started


def _rows(work: str, started: list[lanes.Lane], args: Any) -> list[dict[str, Any]]:
    """A row an arm of a work; ratios are those of segments."""
    own, segment = [lane for lane in started if lane.name.startswith(f"{work}:")], accelerator_turns.WORKS[work].segment
    if not own:
        return []
    rates = [lanes.rates_of(lane, args.warm_up)[:-1] for lane in own]
    return [
        {
            "arm": lane.name,
            "ms a step": common.spread(1e3 * seconds / segment for seconds in lane.seconds[args.warm_up : -1]),
            "tokens/s": common.spread(rate),
            "times": common.spread(mine / other for mine, other in zip(rate, rates[0], strict=True)),
            "MFU": median(rate) * lane.facts["flops"] / accelerator_turns.PEAK,
            "device GB": lane.facts["device GB"],
            "first step s": lane.facts["first step s"],
            "compile s": lane.facts["compile s"],
            "loss apart": lanes.apart(own[0], lane, "loss"),
            "losses": [round(entry["loss"], 5) for entry in lane.facts["logs"]],
        }
        for lane, rate in zip(own, rates, strict=True)
    ]


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
