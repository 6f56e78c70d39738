"""The child process of `sft`: an SFT trainer that trains one segment per request."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import common, turns

_TURN = re.compile(r"\n\n(Human|Assistant): ")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


# The repeating pattern of layer types of a model type.
LAYER_TYPES = {
    "qwen3": ("full_attention",),
    "lfm2": ("conv", "conv", "full_attention"),
    "qwen3_5_text": ("linear_attention", "linear_attention", "linear_attention", "full_attention"),
}


def build_model(folder: Path, data: Path, layers: int, width: int, vocabulary: int, model_type: str = "llama") -> None:
    """Write a causal model with random weights, and train a tokenizer on the data. The model's vocabulary may be larger
    than the tokenizer's."""
    turns.build_small(folder, data, layers, width)
    if model_type != "llama":
        _build(folder, model_type, layers, width, vocabulary)
    elif vocabulary != turns.VOCABULARY:
        common.build_llama(folder, layers=layers, width=width, vocab_size=vocabulary)


def _build(folder: Path, model_type: str, layers: int, width: int, vocabulary: int) -> None:
    """Write a model of another type with the sizes of the llama and random weights, using torch."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kinds = LAYER_TYPES[model_type]
    sizes = {
        "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "vocab_size": vocabulary,
        "num_attention_heads": width // 32, "num_key_value_heads": width // 64, "head_dim": 32,
        "layer_types": [kinds[layer % len(kinds)] for layer in range(layers)], "block_auto_adjust_ff_dim": False,
        "linear_num_key_heads": width // 64, "linear_num_value_heads": width // 32, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if model_type == "qwen3":  # rope_theta of the published models, and of all qwen3 in Tunix 0.1.7
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1_000_000.0}
    defaults = AutoConfig.for_model(model_type).to_dict()
    config = AutoConfig.for_model(model_type, **{name: size for name, size in sizes.items() if name in defaults})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def take(pipe: Connection, side: str, model: Path, rows: dict, config: dict, segment: int, stop: int) -> None:
    """Build the trainer, report it, then train to step `stop` as `turns.train` does."""
    package = turns.package_of(side)
    compiling = turns.count_compilation() if side == "trl_jax" else []
    trainer = package.SFTTrainer(
        model=str(model),
        args=package.SFTConfig(**config),
        train_dataset=dataset(model, **rows),
        processing_class=tokenizer(model),
    )
    turns.train(pipe, trainer, side, segment, stop, {"rows": len(trainer.train_dataset)}, compiling)


def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(model)
    words.chat_template = words.chat_template or _TEMPLATE
    return words


def dataset(model: Path, *, kind: str, data: Path, count: int, length: int) -> Any:
    """Conversations from the data as messages, or rows of random ids of one length."""
    import numpy as np
    from datasets import Dataset

    if kind == "control":
        ids = np.random.default_rng(0).integers(10, 8000, (count, length))
        return Dataset.from_list([{"input_ids": row.tolist()} for row in ids])
    rows = [{"messages": messages(row["chosen"])} for row in common.read_rows(data)]
    return Dataset.from_list([row for row in rows if row["messages"]][:count])


def messages(text: str) -> list[dict[str, str]]:
    """The messages of a text of hh-rlhf."""
    _, *parts = _TURN.split(text)
    return [{"role": _ROLES[role], "content": content} for role, content in zip(parts[::2], parts[1::2], strict=True)]


def peak(side: str, model: Path, rows: dict, config: dict) -> dict[str, float]:
    """Median CPU seconds per step (without the first two) and peak memory of a run of five steps."""
    from transformers import TrainerCallback

    package, ends = turns.package_of(side), []

    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            if side == "trl_jax":
                turns.settle(model)
            ends.append(time.process_time())

    trainer = package.SFTTrainer(
        model=str(model),
        args=package.SFTConfig(**config | {"max_steps": 5}),
        train_dataset=dataset(model, **rows),
        processing_class=tokenizer(model),
        callbacks=[Ends()],
    )
    turns.silence(trainer)
    trainer.train()
    return {"peak MB": common.memory(), "CPU s a step": median(after - before for before, after in pairwise(ends[1:]))}
