"""A trial of a script's compute_metrics before training: one for predictions of another shape fails in the first
minute, and not in the first evaluation."""

from __future__ import annotations

import contextlib
import io
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from datasets import Dataset

from trl_jax.run import data
from trl_jax.run.evaluation.predictions import Predicted, token_ids_of
from trl_jax.run.state import RunState

logger = logging.getLogger(__name__)

_ROWS = 2


def try_metrics(
    run: RunState, compute_metrics: Callable, outputs_of: Callable[[Any, int, np.random.Generator], tuple[Any, Any]]
) -> None:
    """Call compute_metrics with drawn outputs of the first rows of the evaluation set. The model is not asked, and what
    the function prints or draws is forgotten.

    Args:
        outputs_of: `(arrays of a batch, its examples, generator) -> (predictions, labels)`, `()` for no labels.

    Raises:
        TypeError, AttributeError, LookupError, ValueError: those of compute_metrics, with a note. Other errors are
            warned of: two rows may be too few for it.
    """
    dataset = next(iter(run.eval_dataset.values())) if isinstance(run.eval_dataset, dict) else run.eval_dataset
    if not isinstance(dataset, Dataset) or len(dataset) == 0:
        return
    rows = dataset.select(range(min(_ROWS, len(dataset))))
    predicted = _drawn(run, rows, outputs_of)
    try:
        with _unnoticed():
            predicted.metrics(compute_metrics, run.args.include_for_metrics, run.args.batch_eval_metrics)
    except Exception as error:
        shapes = jax.tree.map(np.shape, (predicted.joined, predicted.joined_labels))
        text = f"{len(rows)} rows of the evaluation set: predictions {shapes[0]}, label_ids {shapes[1]}, numbers drawn"
        if not isinstance(error, TypeError | AttributeError | LookupError | ValueError):
            logger.warning("compute_metrics fails on %s (%s: %s).", text, type(error).__name__, error)
            return
        error.add_note(f"compute_metrics was tried before training on {text}.")
        raise


def _drawn(run: RunState, rows: Dataset, outputs_of: Callable) -> Predicted:
    """Predictions of these rows in the form of an evaluation's, drawn."""
    generator, columns = np.random.default_rng(0), run.task.columns.texts
    predictions, labels, losses, inputs = [], [], [], []
    for step in data.loader(run, rows, training=False).laid_out(layout="padded", divided=False):
        found, known = outputs_of(step.arrays, step.num_examples, generator)
        predictions.append(jax.tree.map(np.asarray, found))
        labels.append(known)
        losses.append(np.zeros(len(columns) * step.num_examples, np.float32))
        inputs.append(token_ids_of(rows, step.rows, columns))
    return Predicted(predictions, labels, losses, inputs, run.args.eval_do_concat_batches, rows)


@contextlib.contextmanager
def _unnoticed() -> Iterator[None]:
    """A context that shows no output, and leaves the global random numbers as they were."""
    states = random.getstate(), np.random.get_state()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
