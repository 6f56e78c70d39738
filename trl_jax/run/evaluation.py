"""Evaluation and prediction, over the constructor's sets or any other."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from transformers.trainer_utils import PredictionOutput, speed_metrics

from trl_jax.engine.evaluation import Evaluated, run_batches, run_evaluation
from trl_jax.engine.prefetch import Prefetched
from trl_jax.engine.sharding import distributed
from trl_jax.engine.spmd import ShardedStep
from trl_jax.run.dataloaders import steps_of
from trl_jax.run.hub_push import Publishing
from trl_jax.run.predictions import Predicted, check_compute_metrics, rows_of
from trl_jax.run.user_loss_step import HookedEvaluation, OwnPrediction


class Evaluating(Publishing):
    """`evaluate` and `predict`."""

    def __init__(self, *session: Any, compute_metrics: Any, preprocess_logits_for_metrics: Any):
        super().__init__(*session)
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        check_compute_metrics(compute_metrics, self.args.batch_eval_metrics)
        self.sharded_step = (
            None
            if self.sharding_plan is None
            else ShardedStep(self.sharding_plan, self.model.params, self.model.frozen)
        )
        self._score_pass = jax.jit(self._scored, static_argnames=("dtype", "bounded"))
        self._measure = jax.jit(self.evaluation_loss)
        self._own_evaluation: Any = None  # by a script's own methods, batch by batch
        if "prediction_step" in self.overridden:
            self._own_evaluation = OwnPrediction(self)
        elif "compute_loss" in self.overridden:
            self._own_evaluation = HookedEvaluation(self)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss and metrics over a dataset, raw or prepared; `eval_dataset` of the constructor if none is given.

        A dict of datasets is evaluated one by one, `<prefix>_<name>_...` each; a string picks one of the constructor's.
        """
        refuse(ignore_keys=ignore_keys)
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            metrics = {}
            for name, part in dataset.items():
                part = part if eval_dataset is None else self.prepare_dataset(part, f"eval_dataset[{name!r}]")
                metrics |= self._evaluate_one(part, f"{metric_key_prefix}_{name}")
            return metrics
        if isinstance(dataset, str):
            return self._evaluate_one(dataset, metric_key_prefix)
        if dataset is None:
            raise ValueError("evaluate() needs an eval_dataset: pass one to it or to the trainer.")
        dataset = dataset if eval_dataset is None else self.prepare_dataset(dataset, "eval")
        return self._evaluate_one(dataset, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Scores of every pair of a dataset, raw or prepared; of those longer than max_length, too.

        Returns:
            `predictions` float32 `[2N, 1]`, batch by batch: the chosen answers of a batch, then its rejected ones;
            `label_ids` is `()`; `metrics` has the loss and the speed.
        """
        refuse(ignore_keys=ignore_keys)
        start = time.time()
        loader = self.get_test_dataloader(self.prepare_dataset(test_dataset, "test", bounded=False))
        evaluated, predicted = self._run_evaluation(loader, "get_test_dataloader", bounded=False)
        metrics = _prefixed(metric_key_prefix, evaluated.loss(), self._own_metrics(predicted))
        metrics |= self._speed(metric_key_prefix, start, evaluated)
        self._events.fire("on_predict", metrics)
        return PredictionOutput(predictions=predicted.joined, label_ids=(), metrics=metrics)

    def _evaluate_one(self, dataset: Any, prefix: str) -> dict[str, float]:
        start = time.time()
        evaluated, predicted = self._run_evaluation(self.get_eval_dataloader(dataset), "get_eval_dataloader")
        own = {} if self.args.prediction_loss_only else self._own_metrics(predicted)
        metrics = _prefixed(prefix, evaluated.loss(), own) | self._speed(prefix, start, evaluated)
        measured = {"num_tokens": float(self._tokens_seen)} | self.evaluation_metrics(evaluated)
        measured |= self.more_metrics(evaluated, predicted.rows, prefix)
        metrics |= {f"{prefix}_{name}": value for name, value in measured.items()}
        self.log(metrics)
        if self.state.epoch is not None:
            metrics["epoch"] = self.state.epoch
        self._events.fire("on_evaluate", metrics)
        return metrics

    def _run_evaluation(self, loader: Any, method: str, *, bounded: bool = True) -> tuple[Evaluated, Predicted]:
        """Every batch's results, and the predictions as compute_metrics gets them; `bounded`: by max_length."""
        in_full = None if self.is_in_train else self.args.eval_dtype
        dtype = in_full or self.args.compute_dtype
        self.callback_handler.eval_dataloader = loader
        batches, after_each = steps_of(loader, method), partial(self._events.fire, "on_prediction_step")
        with self._on_device():
            if self._own_evaluation is None:
                score = partial(self._score_pass, self.model.arrays, dtype=dtype, bounded=bounded)
                windows = Prefetched(self.windows(batches), None if self.sharding_plan is None else self._placed_window)
                evaluated = run_evaluation(score, self._measure, windows, after_each)
            else:
                evaluate = partial(self._own_evaluation, self.model.arrays, dtype=dtype)
                evaluated = run_batches(evaluate, batches, after_each)
        return evaluated, self._predicted(evaluated, loader.dataset)

    def _predicted(self, evaluated: Evaluated, dataset: Any) -> Predicted:
        rows = evaluated.rows
        if "prediction_step" in self.overridden:
            predictions, labels = (list(part) for part in zip(*evaluated.scores, strict=True))
        else:
            batches = zip(evaluated.scores, evaluated.num_pairs, strict=True)
            predictions, labels = [self.real_scores(*batch) for batch in batches], [()] * len(rows)
        if self.preprocess_logits_for_metrics is not None:
            shown = zip(predictions, labels, strict=True)
            predictions = [jax.tree.map(np.asarray, self.preprocess_logits_for_metrics(*batch)) for batch in shown]
        losses = [
            np.repeat(np.asarray(metrics["loss"], np.float32), 2 * pairs)
            for metrics, pairs in zip(evaluated.metrics, evaluated.num_pairs, strict=True)
        ]
        wants_ids = self.compute_metrics is not None and "inputs" in self.args.include_for_metrics
        inputs = [rows_of(dataset, places) for places in rows] if wants_ids else None
        return Predicted(predictions, labels, losses, inputs, self.args.eval_do_concat_batches, (dataset, rows))

    def _first_pass(self, params: dict, batch: Any, **how: Any) -> jax.Array:
        return self.score(params, jax.tree.map(lambda leaf: leaf[0], batch), **how)

    def _scored(self, params: dict, batch: Any, **how: Any) -> jax.Array:
        if self.sharded_step is None:
            return self._first_pass(params, batch, **how)
        return self.sharded_step.scores(partial(self._first_pass, **how))(params, batch)

    def _placed_window(self, window: Any) -> Any:
        place = self.sharding_plan.rows
        return replace(window, passes=[(distributed(arrays, place), slots) for arrays, slots in window.passes])

    def _own_metrics(self, predicted: Predicted) -> dict[str, float]:
        if self.compute_metrics is None:
            return {}
        args = self.args
        return predicted.metrics(self.compute_metrics, args.include_for_metrics, args.batch_eval_metrics)

    def _speed(self, prefix: str, start: float, evaluated: Evaluated) -> dict[str, float]:
        steps = math.ceil(evaluated.total_pairs / (self.args.per_device_eval_batch_size * self.shards))
        return speed_metrics(prefix, start, num_samples=evaluated.total_pairs, num_steps=steps)


def _prefixed(prefix: str, loss: float, own: dict[str, float]) -> dict[str, float]:
    """In TRL's order: the user's metrics that have the prefix already, the loss, the user's others."""
    ready = {name: value for name, value in own.items() if name.startswith(f"{prefix}_")}
    others = {f"{prefix}_{name}": value for name, value in own.items() if name not in ready}
    return ready | {f"{prefix}_loss": loss} | others


def refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} is not in this release of trl_jax. Leave it out.")
