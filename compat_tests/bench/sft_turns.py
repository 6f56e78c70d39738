"""The far side of `sft`: a trainer of texts in a process of its own that trains when it is told to."""

from __future__ import annotations

import re
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from compat_tests.bench import common, turns

_TURN = re.compile(r"\n\n(Human|Assistant): ")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def build_model(folder: Path, data: Path, layers: int, width: int, vocabulary: int) -> None:
    """A causal llama of noise, and a tokenizer of the data with a chat template; ids beyond its own stay unused."""
    turns.build_small(folder, data, layers, width)
    if vocabulary != turns.VOCABULARY:
        common.build_llama(folder, layers=layers, width=width, vocab_size=vocabulary)


def take(pipe: Connection, side: str, model: Path, rows: dict, config: dict, segment: int, stop: int) -> None:
    """Build the trainer, say so, then train to step `stop`: for each "go" received the seconds of a segment, and at the
    end the tokens of each segment, the logs and the peak of memory."""
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
    """Chats of the data as messages, or rows of random ids of one length."""
    import numpy as np
    from datasets import Dataset

    if kind == "control":
        ids = np.random.default_rng(0).integers(10, 8000, (count, length))
        return Dataset.from_list([{"input_ids": row.tolist()} for row in ids])
    rows = [{"messages": messages(row["chosen"])} for row in common.read_rows(data)]
    return Dataset.from_list([row for row in rows if row["messages"]][:count])


def messages(text: str) -> list[dict[str, str]]:
    """The turns of one of hh-rlhf's texts."""
    _, *parts = _TURN.split(text)
    return [{"role": _ROLES[role], "content": said} for role, said in zip(parts[::2], parts[1::2], strict=True)]


def peak(side: str, model: Path, rows: dict, config: dict) -> dict[str, float]:
    """Seconds of the second step and the peak of memory of a run of two steps."""
    from transformers import TrainerCallback

    package, ends = turns.package_of(side), []

    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            if side == "trl_jax":
                turns.settle(model)
            ends.append(time.perf_counter())

    trainer = package.SFTTrainer(
        model=str(model),
        args=package.SFTConfig(**config | {"max_steps": 3}),
        train_dataset=dataset(model, **rows),
        processing_class=tokenizer(model),
        callbacks=[Ends()],
    )
    turns.silence(trainer)
    trainer.train()
    return {"peak MB": common.memory(), "step s": ends[-1] - ends[-2]}
