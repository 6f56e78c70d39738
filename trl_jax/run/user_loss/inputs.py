"""The batches of a script: dicts of NumPy arrays in TRL's form, made from those of a step."""

from __future__ import annotations

import jax
import numpy as np

from trl_jax.data.example import IGNORED, of_examples
from trl_jax.data.layout.batch import Batch
from trl_jax.tasks.task import Task


def inputs_of(arrays: Batch, task: Task, virtual: int = 0) -> list[dict[str, np.ndarray]]:
    """Each micro-batch of a step of padded rows, without padding examples, in the form of `task.inputs`; without the
    `virtual` tokens that each row begins with."""
    return [
        task.inputs(batch)
        for m in range(len(arrays.weight))
        if (batch := _real_rows(jax.tree.map(lambda leaf, m=m: leaf[m], arrays), len(task.columns.texts), virtual))
    ]


def _real_rows(batch: Batch, texts: int, virtual: int) -> dict[str, np.ndarray]:
    """`input_ids`, `attention_mask` and, where there are targets, `labels` of real rows; numbers of real examples and
    of their texts."""
    examples = int(np.count_nonzero(batch.weight))
    if not examples:
        return {}
    labels = {}
    if batch.targets is None:
        tokens, lengths = (of_examples(array, texts, examples) for array in (batch.tokens, batch.lengths))
    else:
        real = batch.lengths > 0
        tokens, lengths, labels = batch.tokens[real], batch.lengths[real], {"labels": _labels(batch)[real]}
    rows = {"input_ids": tokens, "attention_mask": (np.arange(tokens.shape[1]) < lengths[:, None]).astype(np.int32)}
    rows = {name: values[:, virtual:] for name, values in (rows | labels).items()}
    numbers = {name: values[:examples] for name, values in batch.extras.example.items()}
    numbers |= {name: of_examples(values, texts, examples) for name, values in batch.extras.text.items()}
    return rows | numbers


def _labels(batch: Batch) -> np.ndarray:
    """Transformers' labels `[R, T]` of padded rows: each target at its own place, -100 elsewhere."""
    labels, read = np.full(batch.tokens.size, IGNORED, np.int32), batch.targets >= 0
    labels[batch.reads[read] + 1] = batch.targets[read]
    return labels.reshape(batch.tokens.shape)
