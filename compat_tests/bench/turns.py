"""The far side of `padded_step`: a trainer in a process of its own that trains when it is told to."""

from __future__ import annotations

import importlib
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from compat_tests.bench import common

VOCABULARY = 8192


def build_small(folder: Path, data: Path, layers: int, width: int) -> None:
    """A llama of noise with a tokenizer of the data."""
    texts = [row[side] for row in common.read_rows(data) for side in ("chosen", "rejected")]
    common.build_tokenizer(folder, texts, VOCABULARY)
    common.build_llama(folder, layers=layers, width=width, vocab_size=VOCABULARY)


def take(
    pipe: Connection, side: str, model: Path, data: Path | None, rows: dict, config: dict, segment: int
) -> None:
    """Build the trainer, send facts about its batches, then train; `data` of None means rows of one length.

    Through the pipe: facts; then, for each "go" received, the seconds of a segment; then closing facts.
    """
    start = time.perf_counter()
    package = importlib.import_module(side)
    compiling = _count_compilation() if side == "trl_jax" else []
    trainer = package.RewardTrainer(
        model=str(model),
        args=package.RewardConfig(**config),
        train_dataset=dataset(data, model, config, **rows),
    )
    clock = _clock(pipe, segment, _settle if side == "trl_jax" else lambda model: None)
    trainer.add_callback(clock)
    _silence(trainer)
    ready = time.perf_counter() - start
    pipe.send(_batches(trainer, side) | {"ready s": ready})
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    pipe.send(
        {
            "logs": logs,
            "first step s": clock.first_step,
            "compile s": sum(compiling) if side == "trl_jax" else None,
            "peak MB": common.memory(),
        }
    )


def dataset(data: Path | None, model: Path, config: dict, *, pairs: int, length: int, batch: int) -> Any:
    """Tokenised pairs: the file's that fit max_length, or random tokens that share no prefix."""
    import numpy as np
    from datasets import Dataset
    from transformers import AutoTokenizer

    if data is None:
        ids = np.random.default_rng(0).integers(10, 8000, (pairs, 2, length))
        rows = [{"chosen_ids": pair[0].tolist(), "rejected_ids": pair[1].tolist()} for pair in ids]
        return Dataset.from_list(rows[: pairs // batch * batch])
    words = AutoTokenizer.from_pretrained(model)
    rows = []
    for row in common.read_rows(data):
        ids = {f"{side}_ids": words(text + words.eos_token)["input_ids"] for side, text in row.items()}
        if max(map(len, ids.values())) <= config["max_length"]:
            rows.append(ids)
        if len(rows) == pairs:
            break
    return Dataset.from_list(rows[: len(rows) // batch * batch])


def _batches(trainer: Any, side: str) -> dict[str, Any]:
    """What one epoch's batches are made of, as the trainer's own loader gives them."""
    tokens, places, shapes = 0, 0, []
    for batch in trainer.get_train_dataloader().steps:
        if side == "trl_jax":
            tokens, shape = tokens + batch.num_tokens, batch.arrays.tokens.shape
        else:
            tokens, shape = tokens + int(batch["attention_mask"].sum()), tuple(batch["input_ids"].shape)
        shapes.append(shape)
        places += shape[-1] * shape[-2]
    return {
        "steps an epoch": len(shapes), "tokens an epoch": tokens, "places an epoch": places,
        "shapes": len(set(shapes)),
    }  # fmt: skip


def _clock(pipe: Connection, segment: int, settle: Any) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Waits for its turn before each segment; reading the next batch is part of the segment."""

        def on_train_begin(self, args, state, control, **kwargs):
            self._wait()

        def on_step_end(self, args, state, control, model, **kwargs):
            if state.global_step == 1:
                settle(model)
                self.first_step = time.perf_counter() - self._start
            if state.global_step % segment == 0:
                settle(model)
                pipe.send(time.perf_counter() - self._start)
                if state.global_step < state.max_steps:
                    self._wait()

        def _wait(self):
            pipe.recv()
            self._start = time.perf_counter()

    return Clock()


def _settle(model: Any) -> None:
    """Wait until the step is done: JAX returns before it is."""
    import jax

    jax.block_until_ready(model.params)


def _silence(trainer: Any) -> None:
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)


def _count_compilation() -> list[float]:
    """A list that grows by the seconds of each compilation from now on."""
    import jax

    seconds = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **kwargs: seconds.append(duration) if "backend_compile" in event else None
    )
    return seconds
