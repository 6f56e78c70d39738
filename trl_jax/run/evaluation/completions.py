"""Evaluation of a policy by completions that it writes for the prompts of a dataset."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from datasets import Dataset, IterableDataset
from transformers.trainer_utils import PredictionOutput

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.data.layout.batch import Batch
from trl_jax.data.step_layout import IndexedExample
from trl_jax.engine.devices.spmd import ShardedStep
from trl_jax.mesh.arrays import fetched
from trl_jax.rollout.examples import step_examples
from trl_jax.rollout.source import BASE_SEED_WORDS, RolloutSteps
from trl_jax.run import data
from trl_jax.run.evaluation.evaluation import MetricHooks
from trl_jax.run.reports import speed_metrics
from trl_jax.run.rollouts.steps import CommonNumbers, row_of
from trl_jax.run.state import RunState
from trl_jax.run.step.forward import Forward


class CompletionEvaluator:
    """Completes every prompt of a set as often as the task says, and measures loss, rewards and lengths."""

    def __init__(self, run: RunState, forward: Forward, sharded_step: ShardedStep | None, source: RolloutSteps):
        self._run, self._source, self._numbers = run, source, CommonNumbers(run)

        def first(params: dict, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            loss, sums = forward.loss(params, jax.tree.map(lambda leaf: leaf[0], batch), None)
            return sums | {"loss": loss}

        self.sums = jax.jit(first if sharded_step is None else sharded_step.scores(first))

    def evaluate(self, batches: Any, prefix: str, hooks: MetricHooks) -> dict[str, float]:
        """Loss, speed and metrics over the prompts of a dataset, by name with `prefix`."""
        del hooks
        start, run, dataset = time.monotonic(), self._run, batches.dataset
        losses, sums, counts = [], [], []
        with run.on_device():
            for rows in self.batches(dataset):
                run.progress.interrupts.check()
                found = self._batch(rows)
                losses.append(float(np.sum(found.pop("loss"))))
                sums.append(found)
                counts.append(len(rows))
                run.events.fire("on_prediction_step")
        if not counts:
            raise ValueError("The evaluation set has no rows.")
        total = sum(counts)
        metrics = {f"{prefix}_loss": float(np.average(losses, weights=counts))}
        metrics |= speed_metrics(prefix, start, num_samples=total, num_steps=len(counts))
        measured = self._source.rollout.logged("eval", run.state.global_step) | run.task.metrics(sums, "eval")
        return metrics | {f"{prefix}_{name}": value for name, value in measured.items()}

    def predict(self, batches: Any, prefix: str, hooks: MetricHooks) -> PredictionOutput:
        """The same; there are no predictions but for the table of completions."""
        metrics = self.evaluate(batches, prefix, hooks)
        self._run.events.fire("on_predict", metrics)
        return PredictionOutput(predictions=None, label_ids=None, metrics=metrics)

    def batches(self, dataset: Dataset | IterableDataset) -> list[list[dict[str, Any]]]:
        """The rows of each batch, every prompt as often as it is completed; in TRL's order, the same each time."""
        run, group = self._run, self._run.task.num_generations_eval
        if isinstance(dataset, IterableDataset):
            order = list(dataset.shuffle(seed=run.args.seed))
        else:
            order = TorchGenerator(run.args.seed).permutation(len(dataset))
        for stream in self._source.streams:
            stream.skip(BASE_SEED_WORDS)
        size = run.args.per_device_eval_batch_size * run.shards
        repeated = [index for index in order for _ in range(group)]
        return [[row_of(run, dataset, i) for i in repeated[at : at + size]] for at in range(0, len(repeated), size)]

    def arrays(self, rows: list[dict[str, Any]]) -> Batch:
        """A batch's completions, laid out as one pass."""
        run, task = self._run, self._run.task
        experience = self._source.rollout.make(rows, task.num_generations_eval, "eval")
        layout = replace(data.step_layout(run, training=False), accumulation=1)
        bonus = None if self._source.bonus is None else self._source.bonus.next()
        numbers = self._numbers(bonus)
        groups = step_examples(task, [experience.rows], [experience], 1.0, layout.shards, numbers, run.virtual)
        return layout.step([[IndexedExample(example, 0) for example in group] for group in groups], 0).arrays

    def _batch(self, rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
        run = self._run
        return jax.tree.map(fetched, self.sums(run.arrays, data.placed_pass(run, self.arrays(rows))))
