"""Evaluation with whole logits, batch by batch: for predict() and compute_metrics of a language model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.run.state import RunState
from trl_jax.run.step.routers import aux_loss_sums, aux_loss_weight
from trl_jax.run.user_loss.bound_model import BoundModel
from trl_jax.run.user_loss.inputs import inputs_of
from trl_jax.run.user_loss.token_logits import task_loss

logger = logging.getLogger(__name__)


class LogitsEvaluation:
    """Evaluates a batch of padded rows: `(params, arrays) -> (sums with "loss", (predictions, labels))`.

    Predictions are logits float32 `[rows, T, V]`, of each place for the next token, or what `preprocess` makes of them;
    labels int32 `[rows, T]` are at their own place. T is the batch's longest row, the loss a mean over its targets.
    """

    def __init__(self, run: RunState, preprocess: Callable | None):
        """
        Args:
            preprocess: a script's `preprocess_logits_for_metrics`, called with logits and labels as JAX arrays.

        Raises:
            ValueError: the task's examples have several texts.
        """
        if len(run.task.columns.texts) > 1:
            raise ValueError(
                "predict() and compute_metrics are not in this release of trl_jax where an example has several texts. "
                "Use evaluate(), whose metrics need no logits, or call trainer.model on rows of token ids."
            )
        self._run, self.preprocess, self._warned = run, preprocess, False
        self._evaluate = jax.jit(self._outputs, static_argnames="dtype")

    def __call__(self, params: dict, arrays: Any, *, dtype: str) -> tuple:
        [inputs] = inputs_of(arrays, self._run.task)
        sums, logits = self._evaluate(params, inputs, dtype=dtype)
        longest = int(inputs["attention_mask"].sum(axis=1).max())
        logits, labels = logits[:, :longest], inputs["labels"][:, :longest]
        if self.preprocess is not None:
            return sums, (self.preprocess(logits, jnp.asarray(labels)), labels)
        if not self._warned:
            self._warned = True
            logger.warning(
                "predict() and compute_metrics get whole logits: %s numbers (%.2f GB) of each batch are kept in the "
                "host's memory. preprocess_logits_for_metrics may keep less, such as their argmax.",
                " x ".join(map(str, logits.shape)),
                logits.nbytes / 1e9,
            )
        return sums, (logits, labels)

    def divisor(self, batch: Any) -> float:
        """The number of targets of a batch, which its loss is a mean over."""
        return max(1, int(np.count_nonzero(batch.arrays.targets >= 0)))

    def _outputs(self, params: dict, inputs: dict, *, dtype: str) -> tuple:
        task, labels = self._run.task, inputs["labels"]
        weight = aux_loss_weight(self._run, 1.0)
        bound = BoundModel(self._run.model, params, dtype=dtype, head="lm", aux_loss_weight=weight)
        outputs = bound(inputs["input_ids"], inputs["attention_mask"])
        loss, sums = task_loss(task, outputs.logits, labels)
        sums |= aux_loss_sums(bound.aux_losses)
        return sums | {"loss": bound.balanced(loss, outputs.aux_loss)}, outputs.logits
