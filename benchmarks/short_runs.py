"""Seconds to the first step and to the end of a script with three steps, for trl_jax and TRL in fresh interpreters.

`cold` has an empty compilation cache, `warm` one from the same script, `warm, other rows` one from scripts with other
rows.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks import common

SCRIPT = """
import json, resource, sys, time
began = float(sys.argv[1])
from datasets import Dataset
from {package} import {kind}Config, {kind}Trainer
from transformers import TrainerCallback

class Clock(TrainerCallback):
    at = []
    def on_step_end(self, args, state, control, **kwargs):
        self.at.append(time.time() - began)

args = {kind}Config({out!r}, max_steps=3, report_to="none", save_strategy="no", use_cpu=True, bf16=False,
                    logging_steps=1, disable_tqdm=True)
rows = Dataset.from_list(json.load(open({rows!r})))
trainer = {kind}Trainer({model!r}, args=args, train_dataset=rows, callbacks=[Clock()])
built = time.time() - began
trainer.train()
end = time.time() - began
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([built, Clock.at[0], end, used.ru_utime + used.ru_stime]))
"""
ARMS = ("TRL", "trl_jax, cold", "trl_jax, warm", "trl_jax, warm, other rows")
FIGURES = ("trainer", "first step", "end", "CPU")
WORDS = "bread soup garden engine river letter window market forest winter coffee music planet bridge story".split()


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--kinds", nargs="+", default=["SFT", "Reward"], choices=["SFT", "Reward"])
    options.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    args = options.parse_args()
    common.prepare(args.cpus)
    with tempfile.TemporaryDirectory() as folder:
        measured = {kind: measure(Path(folder), kind, args.arms, args.rounds) for kind in args.kinds}
    common.show([row for kind, times in measured.items() for row in table(kind, times)])
    common.write_json(args.json, measured)


def measure(folder: Path, kind: str, arms: list[str], rounds: int) -> dict[str, list[list[float]]]:
    """For each arm the FIGURES of each round, after an unmeasured round that warms the disk cache."""
    model = build(folder)
    figures: dict[str, list[list[float]]] = {arm: [] for arm in arms}
    for number in range(-1, rounds):
        for arm in arms:
            rows = write_rows(folder, kind, seed=number if arm.endswith("other rows") else 100)
            cache = tempfile.mkdtemp(dir=folder) if arm.endswith("cold") else folder / arm.replace(" ", "")
            times = run(arm, kind, model, rows, cache)
            figures[arm] += [times] if number >= 0 else []
    return figures


def run(arm: str, kind: str, model: Path, rows: Path, cache: Path | str) -> list[float]:
    package = "trl" if arm == "TRL" else "trl_jax"
    code = SCRIPT.format(package=package, kind=kind, model=str(model), rows=str(rows), out=str(model / "out"))
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    command = [sys.executable, "-W", "ignore", "-c", code, str(time.time())]
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(out.stdout.splitlines()[-1])


def build(folder: Path) -> Path:
    """Write a llama of two layers and a tokenizer, without using either library."""
    common.build_llama(folder / "model", layers=2, width=64, vocab_size=512)
    common.build_tokenizer(folder / "model", [" ".join(WORDS)], 400)
    return folder / "model"


def write_rows(folder: Path, kind: str, seed: int) -> Path:
    """Write 64 rows of 8 to 60 words, which depend on the seed."""
    dice = random.Random(seed)
    columns = ("text",) if kind == "SFT" else ("prompt", "chosen", "rejected")
    texts = ([" ".join(dice.choices(WORDS, k=dice.randint(8, 60))) for _ in columns] for _ in range(64))
    path = folder / f"{kind}-{seed}.json"
    path.write_text(json.dumps([dict(zip(columns, row, strict=True)) for row in texts]), encoding="utf-8")
    return path


def table(kind: str, figures: dict[str, list[list[float]]]) -> list[dict[str, str | float]]:
    trl = [median(column) for column in zip(*figures["TRL"], strict=True)] if "TRL" in figures else None
    rows = []
    for arm, times in figures.items():
        columns = list(zip(*times, strict=True))
        row = {"run": f"{kind}, {arm}"} | dict(zip(FIGURES, map(common.spread, columns), strict=True))
        row["end, times TRL's"] = median(columns[2]) / trl[2] if trl else None
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
