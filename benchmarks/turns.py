"""The child process of `speed`: a trainer that trains one segment per request."""

from __future__ import annotations

import importlib
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import common

VOCABULARY = 8192


def build_small(folder: Path, data: Path, layers: int, width: int) -> None:
    """Write a llama with random weights, and train a tokenizer on the data."""
    texts = [row[side] for row in common.read_rows(data) for side in ("chosen", "rejected")]
    common.build_tokenizer(folder, texts, VOCABULARY)
    common.build_llama(folder, layers=layers, width=width, vocab_size=VOCABULARY)


def take(
    pipe: Connection, side: str, model: Path, rows: dict, config: dict, segment: int, stop: int | None = None
) -> None:
    """Build the trainer, send facts about its batches, then train, at most to step `stop`; see `train`."""
    start = time.perf_counter()
    package = package_of(side)
    compiling = count_compilation() if side == "trl_jax" else []
    trainer = package.RewardTrainer(
        model=str(model),
        args=package.RewardConfig(**config),
        train_dataset=dataset(model, config, **rows),
    )
    ready = time.perf_counter() - start
    train(pipe, trainer, side, segment, stop, _batches(trainer, side) | {"ready s": ready}, compiling)


def train(
    pipe: Connection, trainer: Any, side: str, segment: int, stop: int | None, facts: dict, compiling: list[float]
) -> None:
    """Send `facts` through the pipe, then train: for each "go" received, run a segment and send its seconds; at the
    end, send the final facts.

    Args:
        compiling: the list returned by `count_compilation`.
    """
    timer = clock(pipe, segment, stop, settle if side == "trl_jax" else _settle_torch)
    trainer.add_callback(timer)
    silence(trainer)
    pipe.send(facts)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    pipe.send(
        {
            "logs": logs,
            "first step s": timer.first_step,
            "compile s": sum(compiling) if side == "trl_jax" else None,
            "peak MB": common.memory(),
            "device GB": _device_peak(side) / 1e9,
        }
    )


def first_step(side: str, model: Path, rows: dict, config: dict, cache: str) -> None:
    """Train one step, with JAX's compilation cache in the folder `cache`."""
    import os

    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    package = package_of(side)
    args = package.RewardConfig(**config)
    trainer = package.RewardTrainer(model=str(model), args=args, train_dataset=dataset(model, config, **rows))
    silence(trainer)
    trainer.train()


def package_of(side: str) -> Any:
    if side == "trl_jax":
        common.hide_torch()
    return importlib.import_module(side)


def dataset(
    model: Path, config: dict, *, kind: str, data: Path, pairs: int, length: int, batch: int, grouped: bool
) -> Any:
    """Tokenized pairs in full batches; `grouped`: sorted by length within runs of 50 shuffled batches, as in
    transformers."""
    import numpy as np
    from datasets import Dataset

    dice = np.random.default_rng(0)
    most = config["max_length"]
    rows = _read(model, data, pairs, most) if kind == "real" else _drawn(dice, kind, pairs, length, most)
    rows = rows[: len(rows) // batch * batch]
    if grouped:
        drawn = [rows[i] for i in dice.permutation(len(rows))]
        parts = [drawn[at : at + 50 * batch] for at in range(0, len(rows), 50 * batch)]
        rows = [row for part in parts for row in sorted(part, key=lambda row: max(map(len, row.values())))]
        groups = dice.permutation(len(rows) // batch)
        rows = [row for group in groups for row in rows[group * batch : (group + 1) * batch]]
    return Dataset.from_list(rows)


def _read(model: Path, data: Path, pairs: int, most: int) -> list[dict]:
    """The file's first pairs with at most `most` tokens per text."""
    from transformers import AutoTokenizer

    words, rows = AutoTokenizer.from_pretrained(model), []
    for row in common.read_rows(data):
        ids = {f"{side}_ids": words(text + words.eos_token)["input_ids"] for side, text in row.items()}
        if max(map(len, ids.values())) <= most:
            rows.append(ids)
        if len(rows) == pairs:
            break
    return rows


def _drawn(dice: Any, kind: str, pairs: int, length: int, most: int) -> list[dict]:
    """Pairs of random tokens: single turns, or texts of one length without a common prefix."""

    def tokens(count):
        return dice.integers(10, 8000, count).tolist()

    def log_normal(median, spread, limit):
        return int(min(limit, max(4, median * dice.lognormal(0, spread))))

    rows = []
    for _ in range(pairs):
        prompt = tokens(log_normal(30, 0.6, 200)) if kind == "single" else []
        sizes = [log_normal(380, 0.5, most - len(prompt)) if kind == "single" else length for _ in "cr"]
        chosen, rejected = (prompt + tokens(size) for size in sizes)
        rows.append({"chosen_ids": chosen, "rejected_ids": rejected})
    return rows


def _batches(trainer: Any, side: str) -> dict[str, Any]:
    """The sizes of the batches of one epoch, from the trainer's own loader.

    tokens: tokens of both texts.
    filled: positions that are not padding, fewer than `tokens` if prompts are shared.
    places: positions in the arrays.
    """
    batches = trainer.get_train_dataloader()
    sizes = [_ours(batch) for batch in batches.steps] if side == "trl_jax" else [_theirs(batch) for batch in batches]
    tokens, filled, places, shapes = zip(*sizes, strict=True)
    return {"tokens": tokens, "filled": filled, "places": places, "shapes": len(set(shapes))}


def _ours(batch: Any) -> tuple[int, int, int, tuple]:
    tokens, stream = batch.arrays.tokens, batch.arrays.packed
    filled = batch.num_tokens if stream is None else int((stream.first < tokens.shape[-1]).sum())
    return batch.num_tokens, filled, batch.num_places, tokens.shape


def _theirs(batch: Any) -> tuple[int, int, int, tuple]:
    tokens, shape = int(batch["attention_mask"].sum()), tuple(batch["input_ids"].shape)
    return tokens, tokens, shape[0] * shape[1], shape


def clock(pipe: Connection, segment: int, stop: int | None, wait_for: Any) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Waits for a request before each segment; reading the next batch is part of the segment."""

        def on_train_begin(self, args, state, control, **kwargs):
            self._wait()

        def on_step_end(self, args, state, control, model, **kwargs):
            if state.global_step == 1:
                wait_for(model)
                self.first_step = time.perf_counter() - self._start
            if state.global_step % segment == 0:
                wait_for(model)
                pipe.send(time.perf_counter() - self._start)
                control.should_training_stop |= state.global_step == stop
                if state.global_step < (stop or state.max_steps):
                    self._wait()

        def _wait(self):
            pipe.recv()
            self._start = time.perf_counter()

    return Clock()


def settle(model: Any) -> None:
    """Wait until the step is done: JAX dispatches asynchronously."""
    import jax

    jax.block_until_ready(model.params)


def _settle_torch(model: Any) -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _device_peak(side: str) -> int:
    """Peak bytes of arrays on the GPU; 0 on a CPU."""
    if side == "trl_jax":
        import jax

        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def silence(trainer: Any) -> None:
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)


def count_compilation() -> list[float]:
    """A list to which the seconds of each later compilation are appended."""
    import jax

    seconds = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **kwargs: seconds.append(duration) if "backend_compile" in event else None
    )
    return seconds
