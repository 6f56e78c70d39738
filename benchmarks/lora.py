"""Memory and time of a step with full fine-tuning, LoRA and QLoRA, in trl_jax and in TRL with PEFT.

Each number is measured in its own process, on a llama with random weights. For trl_jax, torch is hidden: transformers
would otherwise import it, which takes 0.35 GB. Run it on an idle machine:

    python benchmarks/lora.py --width 768 --layers 12 --steps 12
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MODES = ("full", "lora", "qlora")
SIDES = ("trl_jax", "trl")


def build(folder: Path, width: int, layers: int) -> None:
    """Write a llama of this size with random bfloat16 weights."""
    import torch
    import transformers

    from compat_tests.tiny import tiny_tokenizer

    words = tiny_tokenizer(folder)
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, vocab_size=32_000, num_labels=1, pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id,
    )  # fmt: skip
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def one(side: str, mode: str, folder: str, steps: int, tokens: int) -> dict[str, float]:
    """Median seconds per step, without the first two steps, and the process's peak memory in GB."""
    if side == "trl_jax":
        from benchmarks import common

        common.hide_torch()
    from datasets import Dataset
    from transformers import TrainerCallback

    if side == "trl":
        import torch
        import trl as package
        from peft import LoraConfig
        from transformers import BitsAndBytesConfig

        torch.set_num_threads(len(os.sched_getaffinity(0)))
    else:
        import trl_jax as package
        from trl_jax.hub.peft_config import LoraConfig
        from trl_jax.hub.quantization import BitsAndBytesConfig

    times = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            times.append(time.perf_counter())

    ids = [list(range(2, tokens)) + [1]] * (4 * steps)
    rows = Dataset.from_dict({"chosen_ids": ids, "rejected_ids": [row[::-1][1:] + [1] for row in ids]})
    args = package.RewardConfig(
        tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=4, max_steps=steps, model_init_kwargs={"dtype": "bfloat16"},
    )  # fmt: skip
    options = {}
    if mode != "full":
        options["peft_config"] = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="SEQ_CLS")
    if mode == "qlora":
        format = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, **format)
    trainer = package.RewardTrainer(model=folder, args=args, train_dataset=rows, callbacks=[Clock()], **options)
    trainer.train()
    gaps = sorted(after - before for before, after in zip(times[1:], times[2:], strict=False))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds a step": gaps[len(gaps) // 2], "peak GB": peak / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # side, mode, folder: for the child processes
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(one(*options.one, options.steps, options.tokens)))
        return
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), options.width, options.layers)
        sizes = ["--steps", str(options.steps), "--tokens", str(options.tokens)]
        print("| | " + " | ".join(("seconds a step", "peak GB")) + " |\n| --- | --- | --- |")
        for mode in options.modes:
            for side in options.sides:
                command = [sys.executable, __file__, "--one", side, mode, folder, *sizes]
                ran = subprocess.run(command, capture_output=True, text=True, check=False)
                if ran.returncode:
                    print(f"| {mode}, {side} | failed: {ran.stderr.strip().splitlines()[-1]} | |", flush=True)
                    continue
                result = json.loads(ran.stdout.strip().splitlines()[-1])
                cells = " | ".join(f"{value:.3g}" for value in result.values())
                print(f"| {mode}, {side} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
