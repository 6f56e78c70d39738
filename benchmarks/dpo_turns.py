"""The child process of `dpo`: a preference trainer that trains one segment per request."""

from __future__ import annotations

import importlib
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import common, sft_turns, turns

REFERENCE_FREE = ("ORPO", "CPO")  # which TRL has in trl.experimental


def take(
    pipe: Connection, side: str, trainer: str, model: Path, rows: dict, config: dict, segment: int, stop: int
) -> None:
    """Build a "DPO", "KTO", "ORPO" or "CPO" trainer, report it, then train as `turns.train` does."""
    package = turns.package_of(side)
    if trainer in REFERENCE_FREE:
        package = importlib.import_module(f"{package.__name__}.experimental.{trainer.lower()}")
    compiling = turns.count_compilation() if side == "trl_jax" else []
    built = getattr(package, f"{trainer}Trainer")(
        model=str(model),
        args=getattr(package, f"{trainer}Config")(**config),
        train_dataset=dataset(model, trainer, **rows),
        processing_class=sft_turns.tokenizer(model),
    )
    turns.train(pipe, built, side, segment, stop, {"rows": len(built.train_dataset)}, compiling)


def dataset(model: Path, trainer: str, *, kind: str, data: Path, count: int, length: int) -> Any:
    """Pairs, or for KTO one answer of each, alternately chosen and rejected."""
    from datasets import Dataset

    rows = list(islice(pairs(data) if kind == "pairs" else _control(model, count, length), count))
    if trainer != "KTO":
        return Dataset.from_list(rows)
    kinds = (number % 2 == 0 for number in range(len(rows)))
    return Dataset.from_list(
        [
            {"prompt": row["prompt"], "completion": row["chosen" if desirable else "rejected"], "label": desirable}
            for row, desirable in zip(rows, kinds, strict=True)
        ]
    )


def pairs(data: Path) -> Any:
    """The pairs of hh-rlhf as messages; the answer is the last message."""
    for row in common.read_rows(data):
        chosen, rejected = (sft_turns.messages(row[side]) for side in ("chosen", "rejected"))
        if len(chosen) > 1 and chosen[:-1] == rejected[:-1] and chosen[-1] != rejected[-1]:
            yield {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}


def _control(model: Path, count: int, length: int) -> Any:
    """Pairs of random words that are one token each: `length` tokens with prompt and EOS."""
    import numpy as np

    tokenizer = sft_turns.tokenizer(model)
    words = [tokenizer.decode([number]) for number in range(len(tokenizer))]
    words = [word for word in words if word[:1] == " " and word[1:].isascii() and word[1:].isalpha()]
    words = [word for word, ids in zip(words, tokenizer(words)["input_ids"], strict=True) if len(ids) == 1]
    for drawn in np.random.default_rng(0).choice(words, (count, 2 * length - 3)).tolist():
        prompt, answers = drawn[0], drawn[1:]
        sides = answers[: length - 2], answers[length - 2 :]
        yield {"prompt": prompt, "chosen": "".join(sides[0]), "rejected": "".join(sides[1])}
