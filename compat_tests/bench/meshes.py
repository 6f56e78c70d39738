"""The same run on one device and on meshes of eight pretended ones: how far apart every logged number is.

    python -m compat_tests.bench.meshes                       # six models, ten meshes, 20 steps each
    python -m compat_tests.bench.meshes --models bert --meshes data:8 --layouts padded
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

MODELS = ("llama", "qwen2", "gemma2", "gpt_neox", "qwen3_moe", "bert")
MESHES = (
    "data:2", "data:8", "fsdp:2", "fsdp:8", "data:2,fsdp:2", "data:4,fsdp:2", "tensor:2", "data:4,tensor:2",
    "fsdp:4,tensor:2", "data:2,fsdp:2,tensor:2", "zero:8",
)  # fmt: skip
PAIRS = 8  # of a step, whatever the mesh
FACTS = {"gemma2": {"sliding_window": 7}, "qwen2": {"head": "causal", "tie": True}}


def words(mesh: str) -> tuple[dict, int]:
    """Arguments that say a mesh, and how many shards it has; "zero:8" is DeepSpeed's stage 2 over all eight."""
    if mesh.startswith("zero"):
        return {"deepspeed": {"zero_optimization": {"stage": 2}}}, 8
    sizes = dict(part.split(":") for part in mesh.split(","))
    return {"mesh_shape": mesh}, int(sizes.get("data", 1)) * int(sizes.get("fsdp", 1))


def run(folder, rows, mesh: str, layout: str, accumulation: int = 1, **config):
    from compat_tests import tiny
    from compat_tests.parity.reference import run_ours

    said, shards = words(mesh)
    with tempfile.TemporaryDirectory() as out:
        return run_ours(
            folder,
            rows,
            out,
            eval_rows=tiny.preference_rows(21, seed=9),
            predict_rows=tiny.preference_rows(11, seed=8),
            per_device_train_batch_size=PAIRS // shards // accumulation,
            per_device_eval_batch_size=PAIRS // shards,
            gradient_accumulation_steps=accumulation,
            batch_layout=layout,
            logging_strategy="steps",
            **said,
            **config,
        )


def gaps(mine, other) -> dict[str, float]:
    """The largest gap of any logged key, of the weights, of the evaluation and of the predictions."""
    from compat_tests.parity.marks import timeless, worst

    found = worst(mine.logs, other.logs)
    # Of a bias of the keys the exact gradient is zero: Adam divides rounding by rounding.
    compared = [name for name in other.weights if not re.search("key.*bias|k_proj.bias", name)]
    found["weights"] = max(float(np.abs(mine.weights[name] - other.weights[name]).max()) for name in compared)
    theirs = timeless(other.evaluate_metrics)
    found["evaluation"] = max(abs(mine.evaluate_metrics[key] - value) for key, value in theirs.items())
    found["predictions"] = float(np.abs(mine.predictions - other.predictions).max())
    return found


def eight_devices() -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--models", nargs="+", default=MODELS)
    options.add_argument("--meshes", nargs="+", default=MESHES)
    options.add_argument("--layouts", nargs="+", default=("shared", "padded"))
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--accumulation", type=int, default=1)
    args = options.parse_args()
    os.environ.setdefault("TQDM_DISABLE", "1")
    eight_devices()
    from compat_tests import tiny

    rows = tiny.preference_rows(PAIRS * args.steps, margin=True)
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            tiny.tiny_model(Path(folder), model, **FACTS.get(model, {}))
            for layout in args.layouts:
                alone = run(folder, rows, "data:1", layout, args.accumulation)
                for mesh in args.meshes:
                    start = time.time()
                    found = gaps(run(folder, rows, mesh, layout, args.accumulation), alone)
                    shown = "  ".join(f"{key} {gap:.1e}" for key, gap in found.items() if gap)
                    took = f"{time.time() - start:.0f} s"
                    print(f"{model} {layout} {mesh}: {shown}  ({took})", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
