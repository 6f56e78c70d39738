"""A long run with checkpoints and evaluations, to detect leaks: python -m benchmarks.soak --steps 5000

Prints curves of the process's memory, file handles and threads, and their slopes after the first tenth of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
from pathlib import Path

import numpy as np

import compat_tests.conftest  # noqa: F401  (the CPU, one thread, no network)
from benchmarks.kills import CONFIG
from compat_tests.tiny import preference_rows, tiny_model
from compat_tests.trainer.trainers import FACTS

_BARS = "▁▂▃▄▅▆▇█"


def sample() -> dict[str, float]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    handles = len(os.listdir("/proc/self/fd"))
    return {"MB": pages * os.sysconf("SC_PAGE_SIZE") / 1e6, "handles": handles, "threads": threading.active_count()}


def soak(folder: Path, steps: int) -> list[dict[str, float]]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from transformers.trainer_callback import PrinterCallback

    from trl_jax.trainer.reward_config import RewardConfig
    from trl_jax.trainer.reward_trainer import RewardTrainer

    samples = []

    class Sample(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % max(steps // 100, 1) == 0:
                samples.append({"step": state.global_step} | sample())

    every = max(steps // 50, 1)
    pace = {"max_steps": steps, "save_steps": every, "eval_steps": every, "logging_steps": 50}
    rows = [Dataset.from_list(preference_rows(n, seed=n)) for n in (64, 8)]
    model = tiny_model(folder / "model", "llama", **FACTS)
    args = RewardConfig(str(folder / "run"), **(CONFIG | pace))
    trainer = RewardTrainer(str(model), args, train_dataset=rows[0], eval_dataset=rows[1], callbacks=[Sample()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        samples = soak(Path(folder), steps)
    settled, report = samples[len(samples) // 10 :], {"steps": steps}
    for name in ("MB", "handles", "threads"):
        values = np.asarray([entry[name] for entry in settled])
        slope = np.polyfit([entry["step"] for entry in settled], values, 1)[0] * 1000
        ends = {"first": float(values[0]), "last": float(values[-1]), "highest": float(values.max())}
        report[name] = ends | {"a thousand steps": round(slope, 3)}
        scaled = (values - values.min()) / max(values.max() - values.min(), 1e-9) * (len(_BARS) - 1)
        print(f"{name:8}", "".join(_BARS[int(value)] for value in scaled))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
