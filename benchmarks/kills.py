"""Kill training runs at random times: python -m benchmarks.kills --kills 100 [--trainer grpo|server]

Each run is killed with SIGKILL once or twice, restarted with the same command, and compared with an uninterrupted run:
weights must be bitwise equal, logs identical, and no files left over; in GRPO, completions, rewards and prompts must be
the same as well. The report counts what the processes were doing when they were killed; in GRPO, some are killed while
generating, computing rewards and saving. `server` is GRPO with a stub of a vLLM server, which outlives the runs; some
are killed while it loads their weights.
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
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compat_tests.conftest  # noqa: F401  (the CPU, one thread, no network)
import trl_jax.trainer.grpo_trainer  # imported once, before forking
import trl_jax.trainer.reward_trainer  # noqa: F401
from compat_tests import tiny
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.trainer.trainers import FACTS
from trl_jax.training.checkpoint_files import RECORD

CONFIG = {
    "save_steps": 2, "save_total_limit": 2, "logging_steps": 3, "num_train_epochs": 3, "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 2, "eval_strategy": "steps", "eval_steps": 4, "report_to": "none", "use_cpu": True,
    "bf16": False, "disable_tqdm": True, "pad_to_multiple_of": 64, "log_level": "error",
}  # fmt: skip
MODELS = {"reward": FACTS, "grpo": SMALL, "server": SMALL}
DOING = {"p": "pushing weights", "g": "generating", "r": "judging", "s": "saving"}
SERVER = "TRL_JAX_BENCHMARK_SERVER"  # environment variable with the stub's URL


def reward_run(folder: Path, out: Path) -> Any:
    from datasets import Dataset

    from trl_jax.trainer.reward_config import RewardConfig
    from trl_jax.trainer.reward_trainer import RewardTrainer

    rows = [Dataset.from_list(tiny.preference_rows(n, seed=n)) for n in (25, 6)]
    return RewardTrainer(str(folder), RewardConfig(str(out), **CONFIG), train_dataset=rows[0], eval_dataset=rows[1])


def grpo_run(folder: Path, out: Path) -> Any:
    from compat_tests.training.rollout_run import trainer_of

    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "num_completions_to_print": 0}
    return trainer_of(folder, out, judged=lambda number: time.sleep(0.3), save_total_limit=2, **quiet)[0]


def server_run(folder: Path, out: Path) -> Any:
    from compat_tests.training.rollout_run import trainer_of

    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "num_completions_to_print": 0}
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": os.environ[SERVER],
              "vllm_weights_dir": str(folder.parent / "weights")}  # fmt: skip
    return trainer_of(folder, out, judged=lambda number: time.sleep(0.1), save_total_limit=2, **quiet, **server)[0]


def served(folder: Path) -> int:
    """Start a stub server of the model in a child process, and set `SERVER`. Returns the process id."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        from compat_tests.rollout.stub_server import StubServer

        os.write(write, StubServer(folder).url.encode())
        os.close(write)
        while True:
            signal.pause()
    os.close(write)
    os.environ[SERVER] = os.read(read, 4096).decode()
    os.close(read)
    return child


def told(method: Callable, what: str, tell: Callable[[str], None]) -> Callable:
    """Wrap a method so that it reports its start (upper case) and end (lower case)."""

    def call(*args: Any, **options: Any) -> Any:
        tell(what.upper())
        try:
            return method(*args, **options)
        finally:
            tell(what)

    return call


def train(trainer: str, folder: Path, out: Path, began: int) -> None:
    """The command: resumes from the last checkpoint, if any. From the start of training, it reports to the file
    descriptor `began` what it does."""
    from transformers import TrainerCallback
    from transformers.trainer_callback import PrinterCallback
    from transformers.trainer_utils import get_last_checkpoint

    from trl_jax.rollout.rewards import RewardFunctions
    from trl_jax.training import checkpoint_files
    from trl_jax.training.policy_generator import PolicyGenerator
    from trl_jax.training.server import ServerPolicy

    def tell(what: str) -> None:
        os.write(began, what.encode())

    class Tell(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            tell("x")

    run = {"reward": reward_run, "grpo": grpo_run, "server": server_run}[trainer](folder, out)
    if trainer == "server":
        PolicyGenerator.generate = told(PolicyGenerator.generate, "g", tell)
        ServerPolicy.refresh = told(ServerPolicy.refresh, "p", tell)
    else:
        PolicyGenerator.complete = told(PolicyGenerator.complete, "g", tell)
    RewardFunctions.__call__ = told(RewardFunctions.__call__, "r", tell)
    checkpoint_files._write_whole = told(checkpoint_files._write_whole, "s", tell)
    run.add_callback(Tell())
    run.remove_callback(PrinterCallback)
    run.train(resume_from_checkpoint=get_last_checkpoint(str(out)) is not None)
    run.save_model(str(out / "final"))
    clock = ("runtime", "per_second", "step_time")
    logs = [
        {k: v for k, v in log.items() if not k.endswith(clock) and not k.startswith("perf/")}
        for log in run.state.log_history
    ]
    (out / "logs.json").write_text(json.dumps(logs))


def forked(trainer: str, folder: Path, out: Path, kill_after: float | None) -> tuple[float, set[str]]:
    """Train in a child process, which is killed `kill_after` seconds after training starts. Returns how long it trained
    and what it was doing when it ended."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(trainer, folder, out, write)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    os.read(read, 1)
    start = time.time()
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    written = b""
    while part := os.read(read, 4096):  # until the child exits
        written += part
    os.close(read)
    _, status = os.waitpid(child, 0)
    if kill_after is None and status:
        raise SystemExit(f"a run failed with status {status}")
    text = written.decode()
    doing = {name for letter, name in DOING.items() if text.count(letter.upper()) > text.count(letter)}
    return time.time() - start, doing or {"training" if os.WIFSIGNALED(status) else "done"}


def outcome(out: Path) -> dict[str, bytes]:
    """What is compared: weights, optimizer and other training state, logs, tables of completions, and the names of all
    files in the folder, except the record that a run leaves if it starts from scratch next to checkpoints of the killed
    run."""
    names = sorted(path.name for path in out.iterdir() if path.name != RECORD)
    files = [out / "final" / "model.safetensors", out / "logs.json", *out.glob("checkpoint-*/model.safetensors")]
    files += [*out.glob("checkpoint-*/training_state/arrays.safetensors"), *out.glob("completions/*")]
    return {"names": repr(names).encode()} | {str(path.relative_to(out)): path.read_bytes() for path in sorted(files)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", choices=sorted(MODELS), default="reward")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    base, rng, killed, doing = Path(tempfile.mkdtemp()), random.Random(options.seed), 0, Counter()
    model = base / "model"
    if os.fork() == 0:  # torch builds the model; its threads must not run in a process that forks
        tiny.tiny_model(model, "llama", **MODELS[options.trainer])
        os._exit(0)
    os.wait()
    server = served(model) if options.trainer == "server" else None
    length, _ = forked(options.trainer, model, base / "whole", None)
    if options.kills > 5:  # measure the length with a warm compilation cache
        length, _ = forked(options.trainer, model, base / "warm", None)
    else:
        length /= 3
    expected = outcome(base / "whole")
    while killed < options.kills:
        out = base / f"run-{killed}"
        for _ in range(min(rng.choice((1, 1, 2)), options.kills - killed)):
            while (doing_now := forked(options.trainer, model, out, rng.uniform(0, length))[1]) == {"done"}:
                shutil.rmtree(out)  # it finished before it was killed
            doing.update(doing_now)
            killed += 1
        forked(options.trainer, model, out, None)
        different = [name for name, content in outcome(out).items() if expected.get(name) != content]
        if different or len(outcome(out)) != len(expected):
            raise SystemExit(f"after kill {killed} (seed {options.seed}): {different} differ in {out}")
        shutil.rmtree(out)
    if server is not None:
        os.kill(server, signal.SIGKILL)
    shutil.rmtree(base)
    report = {"kills": killed, "seconds of the whole run": round(length, 2), "different": 0, "killed while": doing}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
