"""Evaluation with whole logits, batch by batch: for predict() and compute_metrics of a language model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.data.example import of_examples
from trl_jax.data.layout.batch import Batch
from trl_jax.run.evaluation.divisor import divisor_of
from trl_jax.run.state import RunState
from trl_jax.run.step.forward import Forward
from trl_jax.run.step.routers import aux_loss_sums, aux_loss_weight
from trl_jax.run.user_loss.bound_model import BoundModel
from trl_jax.run.user_loss.inputs import inputs_of
from trl_jax.run.user_loss.token_logits import task_loss

logger = logging.getLogger(__name__)


class LogitsEvaluation:
    """Evaluates a batch of padded rows: `(params, arrays) -> (sums with "loss", (predictions, labels))`.

    Predictions are logits float32 `[rows, T, V]`, of each place for the next token, or what `preprocess` makes of them;
    labels int32 `[rows, T]` are at their own place. Where an example has several texts, the task compares with a
    reference, or its loss asks for numbers of reads, the labels are the token ids, as in TRL, and the rows are those of
    the texts that count as trained on: first texts of all examples, then second ones. T is the longest row, the loss a
    mean over targets or examples.
    """

    def __init__(self, run: RunState, forward: Forward, preprocess: Callable | None):
        """
        Args:
            preprocess: a script's `preprocess_logits_for_metrics`, called with logits and labels as JAX arrays.
        """
        self._run, self._forward, self.preprocess, self._warned = run, forward, preprocess, False
        columns, count = run.task.columns, len(run.task.columns.texts)
        alone = count == 1 and not columns.optional and run.task.axis == "text"
        self._texts = None if alone else columns.num_primary_texts or count
        self._virtual = run.virtual.count
        self._evaluate = jax.jit(self._loss_of_logits, static_argnames="dtype")
        self._evaluate_beside = jax.jit(self._loss_and_logits, static_argnames="dtype")

    def __call__(self, params: dict, arrays: Any, *, dtype: str) -> tuple:
        sums, logits, labels = (self._of_labels if self._texts is None else self._of_texts)(params, arrays, dtype)
        if self.preprocess is not None:
            return sums, (self.preprocess(logits, jnp.asarray(labels)), labels)
        if not self._warned:
            self._warned = True
            logger.warning(
                "predict() and compute_metrics get whole logits: %s numbers (%.2f GB) of each batch are kept in the "
                "host's memory. A function of logits and labels that is set as trainer.preprocess_logits_for_metrics "
                "may keep less, such as their argmax.",
                " x ".join(map(str, logits.shape)),
                logits.nbytes / 1e9,
            )
        return sums, (logits, labels)

    def drawn(self, arrays: Batch, generator: np.random.Generator) -> tuple[Any, np.ndarray]:
        """`(predictions, labels)` of a batch whose logits are drawn: in the shapes of the computed ones."""
        labels = self._labels(arrays)
        vocab = self._run.vocab_size  # each token's logits are those of the one before, moved on: cheap to draw
        drawn = generator.standard_normal(labels.size + vocab - 1, np.float32)
        logits = np.lib.stride_tricks.sliding_window_view(drawn, vocab).reshape(*labels.shape, vocab)
        if self.preprocess is None:
            return logits, labels
        return self.preprocess(jnp.asarray(logits), jnp.asarray(labels)), labels

    def divisor(self, batch: Any) -> float:
        """The number of targets, or of examples, that the loss of a batch is a mean over."""
        return divisor_of(self._run.task, batch)

    def _labels(self, arrays: Batch) -> np.ndarray:
        """The labels of a batch, as long as its longest row."""
        if self._texts is None:
            [inputs] = inputs_of(arrays, self._run.task, self._virtual)
            return inputs["labels"][:, : int(inputs["attention_mask"].sum(axis=1).max())]
        batch: Batch = jax.tree.map(lambda leaf: leaf[0], arrays)
        examples, rows = int(np.count_nonzero(batch.weight)), len(batch.weight) * self._texts
        tokens, lengths = (of_examples(array[:rows], self._texts, examples) for array in (batch.tokens, batch.lengths))
        return tokens[:, self._virtual : int(lengths.max())]

    def _of_labels(self, params: dict, arrays: Any, dtype: str) -> tuple:
        labels = self._labels(arrays)
        if self._virtual:  # which predict first tokens, of which these logits know nothing
            batch = jax.tree.map(lambda leaf: leaf[0], arrays)
            sums, logits = self._evaluate_beside(params, batch, dtype=dtype)
            return sums, logits[batch.lengths > 0, : labels.shape[1]], labels
        [inputs] = inputs_of(arrays, self._run.task)
        sums, logits = self._evaluate(params, inputs, dtype=dtype)
        return sums, logits[:, : labels.shape[1]], labels

    def _loss_of_logits(self, params: dict, inputs: dict, *, dtype: str) -> tuple:
        task, labels = self._run.task, inputs["labels"]
        weight = aux_loss_weight(self._run, 1.0)
        bound = BoundModel(self._run.model, params, dtype=dtype, head="lm", aux_loss_weight=weight)
        outputs = bound(inputs["input_ids"], inputs["attention_mask"])
        loss, sums = task_loss(task, outputs.logits, labels)
        sums |= aux_loss_sums(bound.aux_losses)
        return sums | {"loss": bound.balanced(loss, outputs.aux_loss)}, outputs.logits

    def _of_texts(self, params: dict, arrays: Batch, dtype: str) -> tuple:
        batch, labels = jax.tree.map(lambda leaf: leaf[0], arrays), self._labels(arrays)
        sums, logits = self._evaluate_beside(params, batch, dtype=dtype)
        logits = of_examples(logits, self._texts, int(np.count_nonzero(batch.weight)))
        return sums, logits[:, : labels.shape[1]], labels

    def _loss_and_logits(self, params: dict, batch: Batch, *, dtype: str) -> tuple:
        """The task's loss without logits, and logits `[rows, T, V]` by a pass of their own, as TRL makes them."""
        run, rows = self._run, len(batch.tokens) if self._texts is None else len(batch.weight) * self._texts
        outputs = self._forward.outputs(params, batch, dtype=dtype, bounded=False)
        sums = self._forward.measure(outputs, batch._replace(micro_batch=None, pass_weight=batch.weight))
        policy = params if run.reference is None else run.reference.split(params)[0]
        bound = BoundModel(run.model, policy, dtype=dtype, head="lm")
        mask = (jnp.arange(batch.tokens.shape[1]) < batch.lengths[:rows, None])[:, self._virtual :]
        return sums, bound(batch.tokens[:rows, self._virtual :], mask).logits
