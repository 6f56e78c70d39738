"""The time to save and load a checkpoint: python -m benchmarks.saving --megabytes 300 --folder DISK

Saves and loads the weights of a model of that size and AdamW's two moments; reports the median time of each part.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from compat_tests.faults.killed_saves import events_of
from trl_jax.training.checkpoint_files import (
    TENSORS,
    AsyncSaver,
    LoopProgress,
    SavedProgress,
    digest,
    host_copy,
    progress_json,
    save_checkpoint,
    sync,
    verify,
    write_progress,
)


def timed(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def once(base: Path, trees: dict) -> dict[str, float]:
    run_dir = Path(tempfile.mkdtemp(dir=base))
    parts = {"copy to the host": timed(lambda: jax.tree.map(lambda leaf: np.array(leaf), trees))}

    def write(folder: Path) -> None:
        start = time.perf_counter()
        on_host = {name: np.asarray(leaf) for name, leaf in trees["params"].items()}
        save_file(on_host, folder / "model.safetensors")
        write_progress(folder, [], {"optimizer": trees["optimizer"]}, progress_json(LoopProgress(), {}))
        files = [folder / "model.safetensors", folder / TENSORS]
        parts["write"] = time.perf_counter() - start
        parts["onto the disk"] = sum(timed(lambda file=file: sync(file)) for file in files)
        parts["digest"] = sum(timed(lambda file=file: digest(file)) for file in files)

    whole = timed(lambda: save_checkpoint(str(run_dir), write, events_of(1), {"dataset": None}))
    parts["the whole save"] = whole - parts["digest"]  # which was computed twice
    parts["blocks training, written aside"] = aside(run_dir, trees)
    parts["verify"] = timed(lambda: verify(run_dir / "checkpoint-1"))
    saved = SavedProgress(run_dir / "checkpoint-1")
    parts["read the moments"] = timed(lambda: saved.tree("optimizer", trees["optimizer"]))
    shutil.rmtree(run_dir)
    return parts


def aside(run_dir: Path, trees: dict) -> float:
    """Seconds until the next step may start: the arrays are copied, and a thread saves them."""
    background, start = AsyncSaver(), time.perf_counter()
    on_host = host_copy(trees)

    def write(folder: Path) -> None:
        save_file(on_host["params"], folder / "model.safetensors")
        write_progress(folder, [], {"optimizer": on_host["optimizer"]}, progress_json(LoopProgress(), {}))

    save_checkpoint(str(run_dir), write, events_of(2), {"dataset": None}, begin=background.begin)
    blocked = time.perf_counter() - start
    background.settle()
    return blocked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=300, help="of the weights; a checkpoint has three times that")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    count = 10
    params = {str(i): jnp.full((options.megabytes * 1_000_000 // 4 // count,), i, jnp.float32) for i in range(count)}
    trees = {"params": params, "optimizer": {"mu": params, "nu": params}}
    runs = [once(options.folder, jax.block_until_ready(trees)) for _ in range(options.times)]
    medians = {name: round(median(run[name] for run in runs), 3) for name in runs[0]}
    written = medians["write"] + medians["onto the disk"]
    medians["digest / (write, onto the disk)"] = round(medians["digest"] / written, 3)
    print(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
