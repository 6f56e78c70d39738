"""The child process of `accelerator`: a trainer on a GPU that trains one segment per request."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import common, sft_turns, turns

PEAK = 989.4e12  # dense bfloat16 FLOP/s of an H100 or H200
_SIZES = {
    "qwen3": (1024, 3072, 28, 16, 151936),
    "llama": (4096, 14336, 32, 32, 128256),
    "tiny": (64, 128, 2, 4, 8192),
}
_NAMES = "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size".split()


class Work(NamedTuple):
    """Model, examples per step, steps per segment, and tokens per text (approximate for real data)."""

    model: str
    batch: int
    segment: int
    length: int


WORKS = {
    "chats": Work("qwen3", 16, 4, 256),
    "pairs": Work("qwen3", 8, 4, 256),
    "long": Work("qwen3", 4, 4, 2048),
    "lora": Work("llama", 4, 2, 2048),
    "grpo": Work("qwen3", 64, 1, 384),
}


def prepare(device: str, share: float) -> None:
    """Use no network; on a GPU, let several processes share its memory."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": str(share)}
    if device == "cpu":
        os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def build_model(folder: Path, data: Path, kind: str) -> None:
    """Write a model with random bfloat16 weights, drawn by torch on the GPU if there is one, and train a tokenizer on
    the data."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    texts = [row[side] for row in common.read_rows(data) for side in ("chosen", "rejected")]
    common.build_tokenizer(folder, texts, turns.VOCABULARY)
    model_type = kind.removeprefix("tiny-")
    sizes = dict(zip(_NAMES, _SIZES["tiny" if kind.startswith("tiny-") else kind], strict=True))
    sizes["head_dim"] = 16 if kind.startswith("tiny-") else 128
    groups = {"num_key_value_heads": sizes["num_attention_heads"] // (2 if model_type == "qwen3" else 4)}
    config = AutoConfig.for_model(
        model_type, **sizes, **groups, tie_word_embeddings=model_type == "qwen3", max_position_embeddings=8192,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def take(
    pipe: Connection, side: str, name: str, model: Path, turns: int, options: Any, config: dict,
    change: Callable[[], None] | None, trace: Path | None,
) -> None:  # fmt: skip
    """Build the trainer and report it, then train; the last segment is profiled if `trace` is a file.

    Args:
        name: name of the work.
        turns: total number of segments.
        options: arguments of the benchmark.
        config: arguments of the arm.
        change: patches the package for this arm, or None.
    """
    try:
        _take(pipe, side, name, model, turns, options, config, change, trace)
    except BaseException:
        import traceback

        print(f"{side} {name}:\n{traceback.format_exc()[-6000:]}", flush=True)
        raise


def text_by_text() -> None:
    from trl_jax.nn.attention import cudnn

    cudnn._packing = lambda: None


def layer_by_layer() -> None:
    from trl_jax.generation import weights

    weights.decodes_by_layer = lambda arrays, shards, platform: shards is None


def _take(pipe, side, name, model, count, options, config, change, trace):
    if side == "trl_jax" and name != "lora":  # PEFT's configuration imports torch
        common.hide_torch()
    package, work = __import__(side), WORKS[name]
    compiling = turns.count_compilation() if side == "trl_jax" else []
    if change is not None:
        change()
    stop = count * work.segment
    config = config | {
        "max_steps": stop, "logging_steps": work.segment, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "bf16": True, "use_cpu": options.device == "cpu",
        "per_device_train_batch_size": work.batch,
    }  # fmt: skip
    trainer = _TRAINERS[name](package, work, model, options, config)
    if trace is not None:
        trainer.add_callback(_profiler(stop - work.segment, trace))
    facts = {"flops": model_flops(json.loads((model / "config.json").read_text()), name)}
    turns.train(pipe, trainer, side, work.segment, stop, facts, compiling)


def _sft(package: Any, work: Work, model: Path, options: Any, config: dict, kind: str = "chats", **more: Any) -> Any:
    config = config | {"train_sampling_strategy": "sequential", "max_length": max(1024, work.length)}
    count = config["max_steps"] * work.batch
    rows = sft_turns.dataset(model, kind=kind, data=options.data, count=count, length=work.length)
    args, words = package.SFTConfig(**config), sft_turns.tokenizer(model)
    return package.SFTTrainer(model=str(model), args=args, train_dataset=rows, processing_class=words, **more)


def _lora(package: Any, work: Work, model: Path, options: Any, config: dict) -> Any:
    arguments = package.ModelConfig(use_peft=True, lora_target_modules="all-linear", lora_r=16, lora_dropout=0.0)
    config = config | {"model_init_kwargs": {"dtype": "bfloat16"}}
    return _sft(package, work, model, options, config, "control", peft_config=package.get_peft_config(arguments))


def _reward(package: Any, work: Work, model: Path, options: Any, config: dict) -> Any:
    config = config | {"train_sampling_strategy": "sequential", "max_length": 1024}
    count = config["max_steps"] * work.batch
    size = {"pairs": count, "length": 0, "batch": work.batch}
    rows = turns.dataset(model, config, kind="real", data=options.data, grouped=False, **size)
    return package.RewardTrainer(model=str(model), args=package.RewardConfig(**config), train_dataset=rows)


def _grpo(package: Any, work: Work, model: Path, options: Any, config: dict) -> Any:
    from benchmarks import grpo

    config = config | {"num_generations": 8, "max_completion_length": work.length // 3}
    rows = grpo.prompts(config["max_steps"] * work.batch // 8, 2 * (work.length // 3))
    args = package.GRPOConfig(**config)
    return package.GRPOTrainer(model=str(model), reward_funcs=grpo.variety, args=args, train_dataset=rows)


_TRAINERS = {
    "chats": _sft, "pairs": _reward, "long": partial(_sft, kind="control"), "lora": _lora, "grpo": _grpo,
}  # fmt: skip


def model_flops(config: dict[str, Any], name: str) -> float:
    """FLOPs per text token, forward and backward: 6 per weight of a linear layer (4 if the base is frozen), plus causal
    attention."""
    width, layers, channels = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * channels, config["num_key_value_heads"] * channels
    weights = layers * width * (2 * queries + 2 * keys + 3 * config["intermediate_size"])
    if name != "pairs":
        weights += width * config["vocab_size"]
    return (4 if name == "lora" else 6) * weights + 3 * layers * 4 * queries * WORKS[name].length / 2


def _profiler(after: int, path: Path) -> Any:
    from transformers import TrainerCallback

    class Profiler(TrainerCallback):
        """Profiles the steps after step `after`."""

        def on_step_end(self, args, state, control, model, **kwargs):
            import jax

            if state.global_step == after:  # also profiles the generation of the next step
                turns.settle(model)
                jax.profiler.start_trace(str(path.with_suffix("")))

        def on_train_end(self, args, state, control, model, **kwargs):
            import jax

            turns.settle(model)
            jax.profiler.stop_trace()
            path.write_text(json.dumps(kernels(path.with_suffix("")), indent=1))

    return Profiler()


def kernels(folder: Path) -> dict[str, Any]:
    """Microseconds of kernels in a trace, by program and by name, the most expensive first."""
    import jax

    names, programs, busy, begin, end = Counter(), Counter(), 0.0, None, None
    file = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)  # the folder may have earlier traces
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if "/device:" not in plane.name:
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                names[event.name] += event.duration_ns / 1e3
                programs[str(dict(event.stats).get("hlo_module", ""))] += event.duration_ns / 1e3
                busy += event.duration_ns / 1e3
                begin = event.start_ns if begin is None else min(begin, event.start_ns)
                end = event.end_ns if end is None else max(end, event.end_ns)
    return {
        "busy us": busy,
        "span us": None if begin is None else (end - begin) / 1e3,
        "programs": programs.most_common(20),
        "kernels": names.most_common(80),
    }
