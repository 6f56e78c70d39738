"""Training speed of trl_jax and TRL with a vision-language model: DPO on pairs and GRPO on prompts, with one image
each. Trainers alternate, as in `dpo`.

The model is a small Qwen2.5-VL with random weights, the images are noise of one size. "tuned" means without gradient
checkpointing. Speeds are compared in tokens per second, image tokens included, as counted by the trainer.
transformers' processor of this model needs torchvision for videos, so TRL gets a processor with a stub for videos.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import types
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import common, lanes, turns
from benchmarks.grpo import ARMS

PATCH, MERGE = 14, 2
TOKENS = START, IMAGE, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    f"{{% if part['type'] == 'image' %}}{START}{IMAGE}{END}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{% endfor %}{% endif %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def main() -> None:
    args = _arguments()
    common.prepare(args.cpus)
    report: dict[str, Any] = {"options": vars(args)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
        common.in_child(build, folder / "model", args.layers, args.width, args.tower_layers)
        for trainer in args.trainers:
            started, stop = [], args.warm_up + args.steps
            for name in args.arms:
                side, arguments = ARMS[name]
                config = _config(name, trainer, args, folder) | arguments
                work = (side, trainer, folder / "model", args.side, config, args.lora)
                started.append(lanes.start(name, take, *work, args.segment, stop))
            lanes.race(started, stop // args.segment)
            rows = report[trainer] = lanes.table(started, args)
            print(f"{trainer}: images of {args.side} x {args.side}, {args.steps} steps measured", flush=True)
            common.show(rows)
    common.write_json(args.json, report)


def _arguments() -> Any:
    options = common.parser(__doc__)
    options.add_argument("--trainers", nargs="+", default=["DPO", "GRPO"], choices=("DPO", "GRPO"))
    options.add_argument("--side", type=int, default=448, help="pixels of an image's side")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--width", type=int, default=256, help="a multiple of 32")
    options.add_argument("--tower_layers", type=int, default=8)
    options.add_argument(
        "--lora",
        action="store_true",
        help="train a LoRA adapter of q_proj and v_proj; the tower has neither, so it is frozen",
    )
    options.add_argument("--pairs", type=int, default=4, help="of a step of DPO")
    options.add_argument("--prompts", type=int, default=2, help="of a step of GRPO")
    options.add_argument("--completions", type=int, default=8, help="of each prompt")
    options.add_argument("--completion", type=int, default=64, help="most tokens of a completion")
    options.add_argument("--segment", type=int, default=1, help="steps a turn")
    options.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    lanes.add_steps(options, warm_up=2, steps=5)
    return options.parse_args()


def _config(name: str, trainer: str, args: Any, folder: Path) -> dict[str, Any]:
    sizes = {"per_device_train_batch_size": args.pairs, "max_length": None}
    if trainer == "GRPO":
        sizes = {
            "per_device_train_batch_size": args.prompts * args.completions, "num_generations": args.completions,
            "max_completion_length": args.completion,
        }  # fmt: skip
    return sizes | {
        "output_dir": str(folder / name), "max_steps": args.warm_up + args.steps, "bf16": False, "use_cpu": True,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": args.segment,
    }  # fmt: skip


def build(folder: Path, layers: int, width: int, tower_layers: int) -> None:
    """Write a Qwen2.5-VL with random weights, a tokenizer and an image processor."""
    common.hide_torch()
    from transformers import AutoTokenizer, Qwen2_5_VLConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from trl_jax import AutoModelForImageTextToText

    common.build_tokenizer(folder, [], vocab_size=0)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    tokenizer.chat_template = TEMPLATE
    start, image, _ = tokenizer.convert_tokens_to_ids(list(TOKENS))
    vision = {
        "hidden_size": width, "intermediate_size": 3 * width, "depth": tower_layers, "num_heads": width // 32,
        "patch_size": PATCH, "window_size": 8 * PATCH, "out_hidden_size": width,
        "fullatt_block_indexes": list(range(3, tower_layers, 4)),
    }  # fmt: skip
    text = {
        "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "vocab_size": 2048,
        "num_attention_heads": width // 32, "num_key_value_heads": width // 64, "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        vision_config=vision, text_config=text, image_token_id=image, vision_start_token_id=start,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    AutoModelForImageTextToText.from_config(config, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE).save_pretrained(folder)


def take(
    pipe: Connection, side: str, kind: str, model: Path, pixels: int, config: dict, lora: bool, segment: int, stop: int
) -> None:
    """Build the trainer, report it, then train as `turns.train` does."""
    package = turns.package_of(side)
    compiling = turns.count_compilation() if side == "trl_jax" else []
    group = config.get("num_generations", 1)
    count = config["max_steps"] * config["per_device_train_batch_size"] // group
    extra: dict[str, Any] = {} if side == "trl_jax" else {"processing_class": _processor(model)}
    if kind == "GRPO":
        extra["reward_funcs"] = variety
    if lora:
        peft = package if side == "trl_jax" else importlib.import_module("peft")
        extra["peft_config"] = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"])
    trainer = getattr(package, f"{kind}Trainer")(
        model=str(model),
        args=getattr(package, f"{kind}Config")(**config),
        train_dataset=rows(kind, count, pixels),
        **extra,
    )
    turns.train(pipe, trainer, side, segment, stop, {"rows": count}, compiling)


def _processor(folder: Path) -> Any:
    """transformers' processor. It loads without torchvision because the check of its video processor is disabled."""
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    Qwen2_5_VLProcessor.check_argument_for_proper_class = lambda self, name, argument: None
    return Qwen2_5_VLProcessor(
        image_processor=AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False),
        tokenizer=AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False),
        video_processor=types.SimpleNamespace(model_input_names=[]),
        chat_template=TEMPLATE,
    )


def rows(kind: str, count: int, pixels: int) -> Any:
    """Prompts of 32 letters with an image each, and for DPO also two answers of 64 letters."""
    import numpy as np
    from datasets import Dataset
    from PIL import Image

    dice, letters = np.random.default_rng(0), list("abcdefghijklmnopqrstuvwxyz")

    def message(role: str, length: int) -> list[dict[str, str]]:
        return [{"role": role, "content": "".join(dice.choice(letters, length))}]

    rows = []
    for _ in range(count):
        picture = Image.fromarray(dice.integers(0, 256, (pixels, pixels, 3), dtype=np.uint8))
        row = {"prompt": message("user", 32), "images": [picture]}
        if kind == "DPO":
            row |= {name: message("assistant", 64) for name in ("chosen", "rejected")}
        rows.append(row)
    return Dataset.from_list(rows)


def variety(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The reward: the number of distinct tokens."""
    return [float(len(set(ids))) for ids in completion_ids]


if __name__ == "__main__":
    main()
