"""Training runs killed at random instants: python -m compat_tests.bench.kills --kills 100

Each run is killed by SIGKILL once or twice, begun again by the same command, and compared with the run that nobody
killed: the saved weights byte for byte, the log number for number, nothing left over in the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

import compat_tests.conftest  # noqa: F401  (the CPU, one thread, no network)
import trl_jax.trainer.reward_trainer  # noqa: F401  (once, for all that are forked)
from compat_tests import tiny
from compat_tests.trainer.trainers import FACTS

CONFIG = {
    "save_steps": 2, "save_total_limit": 2, "logging_steps": 3, "num_train_epochs": 3, "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 2, "eval_strategy": "steps", "eval_steps": 4, "report_to": "none", "use_cpu": True,
    "bf16": False, "disable_tqdm": True, "pad_to_multiple_of": 64, "log_level": "error",
}  # fmt: skip


def train(folder: Path, out: Path, began: int) -> None:
    """The command: goes on from what there is. Writes one byte to `began` once training runs."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from transformers.trainer_callback import PrinterCallback
    from transformers.trainer_utils import get_last_checkpoint

    from trl_jax import RewardConfig, RewardTrainer

    class Tell(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            os.write(began, b"x")

    rows = [Dataset.from_list(tiny.preference_rows(n, seed=n)) for n in (25, 6)]
    args = RewardConfig(str(out), **CONFIG)
    trainer = RewardTrainer(str(folder), args, train_dataset=rows[0], eval_dataset=rows[1], callbacks=[Tell()])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(out)) is not None)
    trainer.save_model(str(out / "final"))
    clock = ("runtime", "per_second")
    logs = [{k: v for k, v in log.items() if not k.endswith(clock)} for log in trainer.state.log_history]
    (out / "logs.json").write_text(json.dumps(logs))


def forked(folder: Path, out: Path, kill_after: float | None) -> float:
    """Train in a process of its own, killed so many seconds after its first step; how long it trained."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(folder, out, write)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    os.read(read, 1)
    os.close(read)
    begun = time.time()
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if kill_after is None and status:
        raise SystemExit(f"a run failed with status {status}")
    return time.time() - begun


def outcome(out: Path) -> dict[str, bytes]:
    """What is compared: weights, logs, and the names of all that is there."""
    names = sorted(path.name for path in out.iterdir())
    files = [out / "final" / "model.safetensors", out / "logs.json", *out.glob("checkpoint-*/model.safetensors")]
    files += out.glob("checkpoint-*/training_state/arrays.safetensors")
    return {"names": repr(names).encode()} | {str(path.relative_to(out)): path.read_bytes() for path in sorted(files)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    base, dice, killed = Path(tempfile.mkdtemp()), random.Random(given.seed), 0
    if os.fork() == 0:  # torch builds the model, and its threads must not be in this process
        tiny.tiny_model(base / "model", "llama", **FACTS)
        os._exit(0)
    os.wait()
    length = forked(base / "model", base / "whole", None)
    length = forked(base / "model", base / "warm", None) if given.kills > 5 else length / 3  # what is compiled is kept
    wanted = outcome(base / "whole")
    while killed < given.kills:
        out = base / f"run-{killed}"
        for _ in range(min(dice.choice((1, 1, 2)), given.kills - killed)):
            forked(base / "model", out, dice.uniform(0, length))
            killed += 1
        forked(base / "model", out, None)
        different = [name for name, content in outcome(out).items() if wanted.get(name) != content]
        if different or len(outcome(out)) != len(wanted):
            raise SystemExit(f"after kill {killed} (seed {given.seed}): {different} differ in {out}")
        shutil.rmtree(out)
    shutil.rmtree(base)
    print(json.dumps({"kills": killed, "seconds of the whole run": round(length, 2), "different": 0}))


if __name__ == "__main__":
    main()
