"""Check that runs compile for GPUs without having one: each trainer, model families with every kind of attention,
meshes, adapters, bfloat16. Needs JAX's plugin for NVIDIA GPUs.

    pip install ".[cuda]"
    python -m benchmarks.gpus --topology h100:8           # half a minute per run
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import common
from compat_tests import tiny
from compat_tests.models import causal

LORA = "--use_peft --lora_target_modules all-linear"
RUNS = (  # trainer, family, mesh of eight devices, extra flags
    *(("sft", "llama", mesh, "") for mesh in ("data:8", "fsdp:8", "data:2,fsdp:4", "fsdp:4,sequence:2")),
    *(("sft", family, "fsdp:4,tensor:2", "") for family in ("llama", "qwen3_moe", "gemma2", "mistral")),
    ("sft", "gpt_oss", "fsdp:8", "--generate 64x128+64"), ("sft", "qwen3_5_text", "fsdp:8", "--generate 64x128+64"),
    ("sft", "llama", "fsdp:8", "--packing true --eval_strategy steps"),
    ("sft", "llama", "fsdp:8", "--batch_layout padded"), ("sft", "llama", "data:8", f"{LORA} --load_in_4bit true"),
    ("sft", "llama", "fsdp:8", "--activation_offloading true"),
    ("reward", "llama", "fsdp:4,tensor:2", "--eval_strategy steps"), ("reward", "bert", "data:8", ""),
    ("dpo", "llama", "fsdp:4,tensor:2", "--eval_strategy steps"), ("dpo", "mistral", "data:2,fsdp:4", ""),
    ("dpo", "llama", "data:8", LORA), ("kto", "qwen3_5_text", "fsdp:4,tensor:2", ""), ("orpo", "llama", "fsdp:8", ""),
    ("cpo", "qwen3_moe", "fsdp:8", ""), ("grpo", "llama", "fsdp:4,tensor:2", "--beta 0.04"),
    ("grpo", "qwen3_moe", "fsdp:4,tensor:2", ""), ("grpo", "gemma2", "fsdp:8", ""), ("grpo", "llama", "fsdp:8", LORA),
    ("rloo", "llama", "data:8", ""), ("distillation", "llama", "fsdp:8", ""),
)  # fmt: skip
SHAPES = {
    "grpo": "--per_device_train_batch_size 8 --max_prompt_length 64 --max_completion_length 64 --num_generations 8",
    "distillation": "--per_device_train_batch_size 4 --max_prompt_length 64 --max_completion_length 64",
}
SHAPES["rloo"], USUAL = SHAPES["grpo"], "--per_device_train_batch_size 2 --max_length 256"


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--topology", default="h100:8", help="eight GPUs of a kind")
    options.add_argument("--runs", type=int, nargs="+", help="numbers of the runs, from 0 on; unset, all of them")
    args = options.parse_args()
    common.prepare(args.cpus)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(len(RUNS)) if args.runs is None else args.runs:
            rows.append(_compiled(RUNS[number], args.topology, Path(scratch)))
            print(rows[-1], flush=True)
    common.show(rows)
    common.write_json(args.json, {"options": vars(args), "rows": rows})
    sys.exit(any(row["failed"] for row in rows))


def _compiled(run: tuple[str, str, str, str], topology: str, scratch: Path) -> dict[str, Any]:
    trainer, family, mesh, flags = run
    folder, start = _model(scratch, family, trainer == "reward"), time.perf_counter()
    command = [sys.executable, "-m", "trl_jax.cli.main", "plan", "--trainer", trainer, "--topology", topology]
    command += ["--model_name_or_path", str(folder), "--mesh_shape", mesh, "--bf16", "true", "--suggestions", "false"]
    command += [*SHAPES.get(trainer, USUAL).split(), *flags.split()]
    if trainer == "distillation":
        command += ["--teacher_model_name_or_path", str(folder)]
    process = subprocess.run(command, capture_output=True, text=True)
    verdicts = [line for line in process.stdout.splitlines() if line.startswith("It ")]
    output = (process.stderr.strip() or process.stdout).splitlines()
    failed = process.returncode != 0 or not verdicts
    return {
        "trainer": trainer, "family": family, "mesh": mesh, "flags": flags, "s": time.perf_counter() - start,
        "told": verdicts[-1] if verdicts else "", "failed": output[-1] if failed else "",
    }  # fmt: skip


def _model(scratch: Path, family: str, scores: bool) -> Path:
    folder = scratch / f"{family}-{scores}"
    if not folder.exists():
        tiny.tiny_model(folder, family) if scores else causal.build(folder, family, tie=False)
    return folder


if __name__ == "__main__":
    main()
