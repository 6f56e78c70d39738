"""The same run on one device and on meshes of eight pretended ones: how far apart every number is, as Markdown.

    python -m compat_tests.bench.meshes                       # six models, their layouts, every mesh, 20 steps each
    python -m compat_tests.bench.meshes --models bert --meshes data:8 --ways plain lora
    python -m compat_tests.bench.meshes --models llama gemma2 --layouts padded packed shared --meshes sequence:2

A bias that moves both answers of a pair alike (a head's own, the last norm's), or all scores of a softmax (that of the
keys), has no gradient: what there is of one is rounding, and Adam divides it by its own size. "but gauge" leaves these
parameters out. What they change of a reward they change of all, so "less mean" takes each run's mean from its rewards.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

MODELS = ("llama", "qwen2", "gemma2", "gpt_neox", "qwen3_moe", "bert")
LAYOUTS = ("padded", "packed", "shared")
MESHES = (
    "data:2", "data:8", "fsdp:2", "fsdp:8", "data:2,fsdp:2", "data:4,fsdp:2", "tensor:2", "data:4,tensor:2",
    "fsdp:4,tensor:2", "data:2,fsdp:2,tensor:2", "zero1:8", "zero2:8", "sequence:2", "data:2,sequence:4",
    "fsdp:2,tensor:2,sequence:2",
)  # fmt: skip
PAIRS = 8  # of a step, whatever the mesh
LACKING = 3  # pairs of the last step that a ragged epoch lacks, and begins again for
FACTS = {"gemma2": {"sliding_window": 7}, "qwen2": {"head": "causal", "tie": True}}
WAYS = ("plain", "accumulated", "ragged", "lora")
GAUGE = re.compile(r"key\.bias|k_proj\.bias|k_lin\.bias|(classifier|score|out_proj)\.bias|final_layer_norm\.bias")
LEVELS = ("min_reward", "mean_reward", "max_reward")


def words(mesh: str) -> tuple[dict, int]:
    """Arguments that say a mesh, and how many shards it has; "zero1:8" is DeepSpeed's stage 1 over all eight."""
    if mesh.startswith("zero"):
        return {"deepspeed": {"zero_optimization": {"stage": int(mesh[4])}}}, 8
    sizes = dict(part.split(":") for part in mesh.split(","))
    return {"mesh_shape": mesh}, int(sizes.get("data", 1)) * int(sizes.get("fsdp", 1))


def run(folder, rows, mesh: str, layout: str, accumulation: int = 1, scores: bool = True, **config):
    """A run; with `scores`, what it evaluates and predicts at its end, too."""
    from compat_tests import tiny
    from compat_tests.parity.reference import run_ours

    asked = {"eval_rows": tiny.preference_rows(21, seed=9), "predict_rows": tiny.preference_rows(11, seed=8)}
    said, shards = words(mesh)
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(sys.stderr):  # transformers prints each log
        return run_ours(
            folder,
            rows,
            out,
            **(asked if scores else {}),
            per_device_train_batch_size=PAIRS // shards // accumulation,
            per_device_eval_batch_size=PAIRS // shards,
            gradient_accumulation_steps=accumulation,
            batch_layout=layout,
            logging_strategy="steps",
            **said,
            **config,
        )


def gaps(mine, other) -> dict[str, float]:
    """The largest gap of any step, of the weights, of the evaluation and of the predictions."""
    from compat_tests.parity.marks import steps_of, timeless, worst

    every = worst(mine.logs, other.logs)
    assert not [key for key in ("num_tokens", "step", "learning_rate", "epoch") if every[key]], every
    found = {key: every[key] for key in ("loss", "grad_norm", "margin")}
    found["rewards"] = max(every[key] for key in LEVELS)
    found["rewards less mean"] = max(
        abs(_spread(ours, key) - _spread(theirs, key))
        for ours, theirs in zip(steps_of(mine.logs), steps_of(other.logs), strict=True)
        for key in LEVELS
    )
    found["weights"] = max(_apart(mine, other, name) for name in other.weights)
    found["weights but gauge"] = max(_apart(mine, other, name, GAUGE) for name in other.weights)
    if other.predictions is None:
        return found
    theirs = timeless(other.evaluate_metrics)
    levels = [f"eval_{key}" for key in LEVELS]
    found["evaluation"] = max(abs(mine.evaluate_metrics[key] - theirs[key]) for key in theirs if key not in levels)
    predicted = mine.predictions - other.predictions
    found["predictions"] = float(np.abs(predicted).max())
    found["predictions less mean"] = float(np.abs(predicted - predicted.mean()).max())
    return found


def _spread(log: dict, key: str) -> float:
    return log[key] - log["mean_reward"]


def _apart(mine, other, name: str, gauge: re.Pattern | None = None) -> float:
    if gauge is not None and gauge.search(name):
        return 0.0
    gap = np.abs(mine.weights[name] - other.weights[name])
    if gauge is not None and name.endswith("query_key_value.bias"):  # by head: query, key, value
        gap = gap.reshape(-1, 3, gap.size // 12)[:, [0, 2]]  # of tiny models' four heads
    return float(gap.max())


def row(folder, rows, mesh: str, layout: str, way: str, alone: dict) -> dict[str, float]:
    """A mesh's gaps to one device, whose run is kept in `alone`; in a ragged one that gets the pairs of the beginning
    once more at the end."""
    config, accumulation = {}, 2 if way == "accumulated" else 1
    whole = rows
    if way == "ragged":
        config, rows = {"train_sampling_strategy": "sequential"}, rows[:-LACKING]
        whole = rows + rows[:LACKING]
    if (layout, way) not in alone:
        alone[layout, way] = run(folder, whole, "data:1", layout, accumulation, **config, **_more(way))
    return gaps(run(folder, rows, mesh, layout, accumulation, **config, **_more(way)), alone[layout, way])


def _more(way: str) -> dict:
    from trl_jax import LoraConfig

    return {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if way == "lora" else {}


def eight_devices() -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


def fits(model: str, layout: str, mesh: str, way: str) -> bool:
    """Whether there is such a run: what encoders make of a prompt depends on its answer, so nothing is shared, and
    their texts are not dealt over devices; eight shards have one pair each."""
    if model == "bert" and (layout == "shared" or "sequence" in mesh):
        return False
    return way != "accumulated" or words(mesh)[1] < PAIRS


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--models", nargs="+", default=MODELS)
    options.add_argument("--meshes", nargs="+", default=MESHES)
    options.add_argument("--layouts", nargs="+", default=LAYOUTS, choices=LAYOUTS)
    options.add_argument("--ways", nargs="+", default=("plain",), choices=WAYS)
    options.add_argument("--steps", type=int, default=20)
    args = options.parse_args()
    os.environ.setdefault("TQDM_DISABLE", "1")
    eight_devices()
    from compat_tests import tiny

    rows, told = tiny.preference_rows(PAIRS * args.steps, margin=True), False
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            tiny.tiny_model(Path(folder), model, **FACTS.get(model, {}))
            alone: dict = {}
            for layout, way, mesh in itertools.product(args.layouts, args.ways, args.meshes):
                if not fits(model, layout, mesh, way):
                    continue
                start, found = time.time(), row(folder, rows, mesh, layout, way, alone)
                if not told:
                    told = shown(["model", "layout", "way", "mesh", *found], ["---"] * (4 + len(found)))
                shown([model, layout, way, mesh, *(f"{gap:.1e}" for gap in found.values())])
                print(f"{model} {layout} {way} {mesh}: {time.time() - start:.0f} s", file=sys.stderr, flush=True)


def shown(*rows: list[str]) -> bool:
    for cells in rows:
        print(f"| {' | '.join(cells)} |", flush=True)
    return True


if __name__ == "__main__":
    main()
