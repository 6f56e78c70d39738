"""Check that flipped bits in a checkpoint are detected: python -m benchmarks.flips --flips 1000"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path

import compat_tests.conftest  # noqa: F401  (the CPU, one thread, no network)
from trl_jax.training.checkpoint_files import BrokenCheckpoint, verify


def unnoticed(folder: Path, flips: int, seed: int) -> tuple[list[str], int]:
    """The flips that `verify` did not report with the file's name, as "file: byte, bit"; and the number of files.

    Files are drawn uniformly, so that small files are covered as well.
    """
    rng, missed = random.Random(seed), []
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for _ in range(flips):
        path = rng.choice(files)
        content = path.read_bytes()
        byte, bit = rng.randrange(len(content)), rng.randrange(8)
        flipped = bytearray(content)
        flipped[byte] ^= 1 << bit
        path.write_bytes(flipped)
        try:
            verify(folder)
        except BrokenCheckpoint as error:
            reported = str(error).startswith(f"{path} ")
        else:
            reported = False
        if not reported:
            missed.append(f"{path.relative_to(folder)}: {byte}, {bit}")
        path.write_bytes(content)
    verify(folder)
    return missed, len(files)


def main() -> None:
    from datasets import Dataset

    from benchmarks.kills import CONFIG
    from compat_tests.tiny import preference_rows, tiny_model
    from compat_tests.trainer.trainers import FACTS
    from trl_jax.trainer.reward_config import RewardConfig
    from trl_jax.trainer.reward_trainer import RewardTrainer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        model = tiny_model(Path(base) / "model", "llama", **FACTS, tokenizer={"chat_template": True})
        args = RewardConfig(f"{base}/run", **(CONFIG | {"max_steps": 2, "eval_strategy": "no"}))
        RewardTrainer(str(model), args, train_dataset=Dataset.from_list(preference_rows(8))).train()
        missed, files = unnoticed(Path(base, "run", "checkpoint-2"), options.flips, options.seed)
    print(json.dumps({"flips": options.flips, "files": files, "unnoticed": missed}))


if __name__ == "__main__":
    main()
