"""Small trainers of either package, and rows for them."""

from __future__ import annotations

import os
from pathlib import Path

from datasets import Dataset, IterableDataset

from compat_tests.parity.reference import BASE
from compat_tests.tiny import preference_rows

# One layer: these tests are about the trainer, and a small model compiles quickly.
FACTS = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def checkpoints(folder) -> list[str]:
    """The names in a run's folder except for the model card and its plot, i.e. the checkpoints."""
    return sorted(name for name in os.listdir(folder) if name not in ("README.md", "training_loss.svg"))


def table(n: int, seed: int = 0, **how) -> Dataset:
    return Dataset.from_list(preference_rows(n, seed=seed, **how))


def stream(n: int) -> IterableDataset:
    rows = preference_rows(n)
    return IterableDataset.from_generator(lambda: iter(rows))


def make(package, model, out, *, train=None, config=None, **arguments):
    """A RewardTrainer of trl or trl_jax on 16 pairs, 4 steps; `config` overrides the parity tests' BASE."""
    args = package.RewardConfig(str(out), **(BASE | (config or {})))
    model = str(model) if isinstance(model, Path) else model
    rows = table(16) if train is None else train
    return package.RewardTrainer(model=model, args=args, train_dataset=rows, **arguments)


class Uncompiled:
    """An uncompiled function with the interface of a jitted one."""

    def __init__(self, function):
        self.function = function

    def lower(self, *given):
        return self

    def compile(self):
        return self.function
