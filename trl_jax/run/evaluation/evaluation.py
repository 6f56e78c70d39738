"""Evaluation and prediction over prepared datasets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from transformers.trainer_utils import PredictionOutput

from trl_jax.data.eval_chunks import EvalChunks
from trl_jax.engine.devices.spmd import ShardedStep
from trl_jax.engine.evaluation import Evaluated, run_batches, run_evaluation
from trl_jax.engine.prefetch import Prefetched
from trl_jax.mesh.arrays import distributed
from trl_jax.run.dataloaders import Batches, steps_of
from trl_jax.run.evaluation.logits import LogitsEvaluation
from trl_jax.run.evaluation.metrics_trial import try_metrics
from trl_jax.run.evaluation.predictions import Predicted, token_ids_of
from trl_jax.run.evaluation.whole_batch import WholeBatchEvaluation
from trl_jax.run.reports import speed_metrics, task_metrics
from trl_jax.run.state import RunState
from trl_jax.run.step.forward import Forward
from trl_jax.run.user_loss.bound_model import UserLoss
from trl_jax.run.user_loss.user_loss_step import UserLossEvaluation, UserPrediction


@dataclass(frozen=True)
class MetricHooks:
    """A script's additions to an evaluation: transformers' functions of those names.

    report: `(evaluated, dataset, prefix) -> metrics`, the trainer's own additions.
    """

    compute_metrics: Callable | None
    preprocess_logits_for_metrics: Callable | None
    report: Callable[[Evaluated, Any, str], dict[str, float]] | None = None


class Evaluator:
    """Runs evaluations, and computes metrics under TRL's names and in its order."""

    def __init__(
        self,
        run: RunState,
        forward: Forward,
        sharded_step: ShardedStep | None,
        user_loss: UserLoss | None,
        prediction_step: Callable,
    ):
        self._run, self._forward, self._sharded_step = run, forward, sharded_step
        self._user_loss, self._prediction_step = user_loss, prediction_step
        self.compile_anew()

    def compile_anew(self) -> None:
        """Forget what was compiled: the task is another."""
        run, forward = self._run, self._forward
        # New functions, as JAX knows by the function what it has traced.
        self._outputs = jax.jit(partial(self.outputs), static_argnames=("dtype", "bounded"))
        self._measure = jax.jit(partial(forward.measure))
        self._by_logits: LogitsEvaluation | None = None
        self._whole = WholeBatchEvaluation(run, forward, self._sharded_step)
        self._by_script: Any = None  # evaluates batch by batch with a script's own methods
        if "prediction_step" in run.overridden:
            self._by_script = UserPrediction(run, self._user_loss, self._prediction_step)
        elif "compute_loss" in run.overridden:
            self._by_script = UserLossEvaluation(run, self._user_loss)

    def evaluate(self, batches: Any, prefix: str, hooks: MetricHooks) -> dict[str, float]:
        """Evaluate the batches of get_eval_dataloader: loss, metrics and speed, by name with `prefix`."""
        start, run = time.monotonic(), self._run
        evaluated, predicted = self._evaluated(batches, "get_eval_dataloader", hooks)
        script_metrics = {} if run.args.prediction_loss_only else self._script_metrics(predicted, hooks)
        metrics = _prefixed(prefix, evaluated.loss(), script_metrics) | self._speed(prefix, start, evaluated)
        measured = task_metrics(run, evaluated.sums, "eval")
        if hooks.report is not None and "prediction_step" not in run.overridden:
            measured |= hooks.report(evaluated, predicted.dataset, prefix)
        return metrics | {f"{prefix}_{name}": value for name, value in measured.items()}

    def predict(self, batches: Any, prefix: str, hooks: MetricHooks) -> PredictionOutput:
        """Predict the batches of get_test_dataloader, texts longer than max_length included."""
        start = time.monotonic()
        evaluated, predicted = self._evaluated(batches, "get_test_dataloader", hooks, predicts=True)
        metrics = _prefixed(prefix, evaluated.loss(), self._script_metrics(predicted, hooks))
        metrics |= self._speed(prefix, start, evaluated)
        self._run.events.fire("on_predict", metrics)
        return PredictionOutput(predictions=predicted.joined, label_ids=predicted.joined_labels, metrics=metrics)

    def try_metrics(self, hooks: MetricHooks) -> None:
        """Try compute_metrics before training, as `metrics_trial.try_metrics` does: where there are a function and an
        evaluation set, and the script has no part in what the function sees."""
        run = self._run
        if hooks.compute_metrics is None or run.eval_dataset is None or run.args.prediction_loss_only or run.own_loss:
            return
        with run.on_device():
            try_metrics(run, hooks.compute_metrics, partial(self._drawn, hooks.preprocess_logits_for_metrics))

    def _drawn(self, preprocess: Callable | None, arrays: Any, examples: int, generator: np.random.Generator) -> tuple:
        task = self._run.task
        if task.head == "lm":
            return self._logits(preprocess).drawn(arrays, generator)
        outputs = generator.standard_normal(len(task.columns.texts) * examples, np.float32)
        predictions = task.predictions(outputs, examples)
        return (predictions if preprocess is None else preprocess(predictions, ())), ()

    def chunks(self, batches: Any) -> EvalChunks:
        """The chunks of an evaluation of this loader's batches."""
        run = self._run
        return EvalChunks(batches, sort=run.model.backend.batch_invariant, whole=run.router_aux_loss_coef != 0)

    def outputs(self, params: dict, batch: Any, **options: Any) -> jax.Array:
        """The model's outputs `[X]` of one pass; where the run is sharded, `[shards, X]`."""
        first = partial(self._first_pass, **options)
        return first(params, batch) if self._sharded_step is None else self._sharded_step.scores(first)(params, batch)

    def _first_pass(self, params: dict, batch: Any, **options: Any) -> jax.Array:
        return self._forward.outputs(params, jax.tree.map(lambda leaf: leaf[0], batch), **options)

    def _evaluated(
        self, batches: Batches, method: str, hooks: MetricHooks, *, predicts: bool = False
    ) -> tuple[Evaluated, Predicted]:
        """The results of a loader's batches; to `predict`, texts may be longer than max_length."""
        run = self._run
        dtype = (None if run.progress.in_train else run.args.eval_dtype) or run.args.compute_dtype
        run.events.handler.eval_dataloader = batches
        steps, after_each = steps_of(batches, method), partial(run.events.fire, "on_prediction_step")
        with run.on_device():
            if self._by_script is not None:
                evaluate = partial(self._by_script, run.model.arrays, dtype=dtype)
                evaluated = run_batches(self._checked(evaluate), steps, after_each)
            elif run.task.head == "lm" and (predicts or hooks.compute_metrics is not None):
                by_logits = self._logits(hooks.preprocess_logits_for_metrics)
                evaluate = self._checked(partial(by_logits, run.arrays, dtype=dtype))
                rows = steps.laid_out(layout="padded", divided=False)
                evaluated = run_batches(evaluate, rows, after_each, by_logits.divisor)
            elif run.task.head == "lm" and run.task.axis == "read":
                evaluate = self._checked(partial(self._whole, run.arrays, dtype=dtype))
                evaluated = run_batches(evaluate, steps, after_each, self._whole.divisor)
            else:
                outputs_of = partial(self._outputs, run.arrays, dtype=dtype, bounded=not predicts)
                place = None if run.sharding_plan is None else self._placed
                chunks = Prefetched(self.chunks(steps), place, run.progress.interrupts.check)
                evaluated = run_evaluation(self._checked(outputs_of), self._measure, chunks, after_each)
        return evaluated, self._predicted(evaluated, batches.dataset, hooks)

    def _logits(self, preprocess: Callable | None) -> LogitsEvaluation:
        """The evaluation with whole logits; the last one, compiled, as long as `preprocess` is the same."""
        if self._by_logits is None or self._by_logits.preprocess is not preprocess:
            self._by_logits = LogitsEvaluation(self._run, self._forward, preprocess)
        return self._by_logits

    def _checked(self, evaluate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The same for each pass, unless a signal has come that breaks an evaluation on the way off."""

        def checked(arrays: Any) -> Any:
            self._run.progress.interrupts.check()
            return evaluate(arrays)

        return checked

    def _placed(self, chunk: Any) -> Any:
        place = self._run.sharding_plan.rows
        return replace(chunk, passes=[(distributed(arrays, place), slots) for arrays, slots in chunk.passes])

    def _predicted(self, evaluated: Evaluated, dataset: Any, hooks: MetricHooks) -> Predicted:
        run, counts = self._run, evaluated.num_examples
        if isinstance(evaluated.outputs[0], tuple):
            predictions, labels = (list(part) for part in zip(*evaluated.outputs, strict=True))
        elif run.task.head == "lm":  # sums of texts, which nobody asked for
            predictions, labels = [()] * len(counts), [()] * len(counts)
        else:
            outputs = zip(evaluated.outputs, counts, strict=True)
            predictions, labels = [run.task.predictions(*batch) for batch in outputs], [()] * len(counts)
        if (preprocess := hooks.preprocess_logits_for_metrics) is not None and run.task.head == "score":
            shown = zip(predictions, labels, strict=True)
            predictions = [jax.tree.map(np.asarray, preprocess(*batch)) for batch in shown]
        texts = len(run.task.columns.texts)
        losses = [
            np.repeat(np.asarray(sums["loss"], np.float32), texts * count)
            for sums, count in zip(evaluated.sums, counts, strict=True)
        ]
        wants_ids = hooks.compute_metrics is not None and "inputs" in run.args.include_for_metrics
        columns = run.task.columns.texts
        inputs = [token_ids_of(dataset, places, columns) for places in evaluated.rows] if wants_ids else None
        return Predicted(predictions, labels, losses, inputs, run.args.eval_do_concat_batches, dataset)

    def _script_metrics(self, predicted: Predicted, hooks: MetricHooks) -> dict[str, float]:
        args = self._run.args
        if hooks.compute_metrics is None:
            return {}
        return predicted.metrics(hooks.compute_metrics, args.include_for_metrics, args.batch_eval_metrics)

    def _speed(self, prefix: str, start: float, evaluated: Evaluated) -> dict[str, float]:
        steps = math.ceil(evaluated.total / (self._run.args.per_device_eval_batch_size * self._run.shards))
        return speed_metrics(prefix, start, num_samples=evaluated.total, num_steps=steps)


def _prefixed(prefix: str, loss: float, metrics: dict[str, float]) -> dict[str, float]:
    """In TRL's order: the script's metrics that have the prefix already, the loss, the script's others."""
    ready = {name: value for name, value in metrics.items() if name.startswith(f"{prefix}_")}
    others = {f"{prefix}_{name}": value for name, value in metrics.items() if name not in ready}
    return ready | {f"{prefix}_loss": loss} | others
