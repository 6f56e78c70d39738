"""A custom trainer: a reward model trained on completions with ratings. `python examples/pointwise.py [folder]`"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tiny_model
from datasets import Dataset, IterableDataset

from trl_jax import BaseConfig, BaseTrainer
from trl_jax.tasks import Batch, Columns, LossBatch, Task, joined, of_examples, prepare_texts, real_examples, summed


def text_of(row: dict[str, Any]) -> dict[str, str]:
    return {"input_ids": row["prompt"] + row["completion"]}


@dataclass(frozen=True)
class PointwiseTask(Task):
    """One text per example; the loss is the squared error between score and rating."""

    head: ClassVar[Literal["score"]] = "score"
    columns: ClassVar[Columns] = Columns(texts=("input_ids",), numbers=("rating",))

    def prepare(self, dataset: Dataset | IterableDataset, tokenizer: Any, **limits: Any) -> Dataset | IterableDataset:
        needed = ("prompt", "completion")
        return prepare_texts(dataset, tokenizer, text_of, self.columns, needed=needed, **limits)

    def loss(self, outputs: jax.Array, batch: Batch | LossBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        error = outputs - batch.extras.example["rating"]
        rows = real_examples(batch.weight, batch.micro_batch)
        squared = jnp.square(error)
        values = {"rows": 1.0, "squared": squared, "absolute": jnp.abs(error)}
        sums = {name: summed(value, rows) for name, value in values.items()}
        return jnp.sum(batch.weight * squared), sums

    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float]:
        names = ("rows", "squared", "absolute")
        totals = joined(sums, dict.fromkeys(names, np.sum), count="rows")
        rows, squared, absolute = (float(totals[name].sum()) for name in names)
        return {"mse": squared / rows, "mae": absolute / rows} if rows else {}

    def predictions(self, outputs: np.ndarray, num_examples: int) -> np.ndarray:
        return of_examples(outputs, 1, num_examples)[:, None]


@dataclass
class PointwiseConfig(BaseConfig):
    max_length: int | None = field(
        default=1024, metadata={"help": "Maximum length in tokens; longer texts are dropped."}
    )
    disable_dropout: bool = field(default=True, metadata={"help": "Disable dropout."})


class PointwiseTrainer(BaseTrainer):
    """Trains a sequence classifier with one output to predict ratings."""

    _name, _tag_names = "Pointwise", ["pointwise"]
    config_class = PointwiseConfig

    def make_task(self) -> PointwiseTask:
        return PointwiseTask()


WORDS = {"thanks": 1.0, "carefully": 0.5, "maybe": -0.5, "whatever": -1.0}


def main(folder: Path) -> None:
    pairs = [(first, second) for first in WORDS for second in WORDS]
    rows = [{"prompt": "How? ", "completion": " ".join(pair), "rating": sum(map(WORDS.get, pair))} for pair in pairs]
    data = Dataset.from_list(rows).train_test_split(test_size=3, seed=0)
    model = tiny_model.build(folder / "start", ("How? " + row["completion"] for row in rows), vocab_size=300)
    args = PointwiseConfig(str(folder), num_train_epochs=20, learning_rate=5e-3, save_strategy="no", report_to="none")
    trainer = PointwiseTrainer(str(model), args, train_dataset=data["train"], eval_dataset=data["test"])
    before = trainer.evaluate()["eval_mse"]
    trainer.train()
    trainer.save_model()
    print(f"Squared error on held-out rows: {before:.3f}, after training {trainer.evaluate()['eval_mse']:.3f}.")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out"))
