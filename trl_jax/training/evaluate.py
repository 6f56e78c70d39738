"""Evaluation and prediction."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset, IterableDataset
from transformers.trainer_utils import EvalPrediction, PredictionOutput, denumpify_detensorize

from trl_jax.config.base import BaseConfig
from trl_jax.core.outputs import Images
from trl_jax.core.torch_random import TorchGenerator
from trl_jax.data.batch import IGNORED, Batch, of_examples, padded_length, rows_of
from trl_jax.data.loader import EvalChunks, ExampleLoader, IndexedExample, StepBatch
from trl_jax.mesh.mesh import distributed, fetched
from trl_jax.rollout.rollout import step_examples
from trl_jax.rollout.steps import BASE_SEED_WORDS, RolloutSteps
from trl_jax.tasks.task import TokenTask, metrics_by_micro_batch
from trl_jax.training import data
from trl_jax.training.data import ROW_IMAGES, Batches, Prefetched, RowImages, inputs_of, steps_of
from trl_jax.training.devices import ShardedStep
from trl_jax.training.forward import Forward, PolicyEqualsReference, TraceAgain, aux_loss_sums, aux_loss_weight
from trl_jax.training.logging import tell_first
from trl_jax.training.metrics import speed_metrics, task_metrics
from trl_jax.training.rollout import RowReader, readable, shared_numbers
from trl_jax.training.state import Setup
from trl_jax.training.user_loss import UserLoss
from trl_jax.training.user_loss_errors import ArraysOrTensors
from trl_jax.training.user_loss_model import TokenModel, task_loss

logger = logging.getLogger(__name__)


class CompletionEvaluator:
    """Evaluates a policy online: completes each prompt of a dataset as often as the task says, and measures loss,
    rewards and lengths."""

    def __init__(self, setup: Setup, forward: Forward, sharded_step: ShardedStep | None, source: RolloutSteps):
        self._setup, self._source = setup, source
        self._equals_reference = PolicyEqualsReference(setup)
        self._forward, self._sharded_step = forward, sharded_step
        self.recompile()

    def recompile(self) -> None:
        """Discard the compiled program, because the task has changed."""
        forward, sharded_step = self._forward, self._sharded_step

        def loss_and_sums(params: dict, batch: Any) -> dict[str, jax.Array]:
            loss, sums = forward.loss(params, data.first_pass(batch), None)
            return sums | {"loss": loss}

        compute = loss_and_sums if sharded_step is None else sharded_step.scores(loss_and_sums)

        def sums(params: dict, batch: Any, values: Any = None) -> dict[str, jax.Array]:
            del values  # static: a user-defined loss reads the trainer's values while it is traced
            return compute(params, batch)

        self.sums = jax.jit(sums, static_argnames="values")

    def evaluate(self, batches: Any, prefix: str, hooks: MetricHooks) -> tuple[dict[str, float], dict[str, float]]:
        """Loss and speed over the prompts of a dataset, whose names start with `prefix`; no others, because these are
        collected."""
        del hooks
        start, setup, dataset = time.monotonic(), self._setup, batches.dataset
        losses, sums, counts = [], [], []
        with setup.on_device():
            for rows in self.batches(dataset):
                setup.progress.interrupts.check()
                batch_sums = self._batch(rows)
                losses.append(float(np.sum(batch_sums.pop("loss"))))
                sums.append(batch_sums)
                counts.append(len(rows))
                setup.events.fire("on_prediction_step")
        if not counts:
            raise ValueError("The evaluation set has no rows.")
        total = sum(counts)
        metrics = {f"{prefix}_loss": float(np.average(losses, weights=counts))}
        metrics |= speed_metrics(prefix, start, num_samples=total, num_steps=len(counts))
        for batch in sums:
            self._source.rollout.metrics["eval"].extend(metrics_by_micro_batch(setup.objective, batch, "eval"))
        self._source.rollout.show("eval", setup.state.global_step)
        return metrics, {}

    def predict(self, batches: Any, prefix: str, hooks: MetricHooks) -> PredictionOutput:
        """Like `evaluate`, with all metrics. The completions are not in the result, only in the logged table."""
        metrics, _ = self.evaluate(batches, prefix, hooks)
        metrics |= {f"{prefix}_{name}": value for name, value in self._source.rollout.metrics["eval"].take().items()}
        self._setup.events.fire("on_predict", metrics)
        return PredictionOutput(predictions=None, label_ids=None, metrics=metrics)

    def batches(self, dataset: Dataset | IterableDataset) -> list[list[dict[str, Any]]]:
        """The rows of each batch, with a prompt repeated for each of its completions; always in TRL's order."""
        setup, group = self._setup, self._setup.task.num_generations_eval
        if isinstance(dataset, IterableDataset):
            order = list(readable(setup, dataset, "eval", shuffle=True))
        else:
            order = TorchGenerator(setup.args.seed).permutation(len(dataset))
        for stream in self._source.streams:
            stream.skip(BASE_SEED_WORDS)
        size = setup.args.per_device_eval_batch_size * setup.shards
        repeated = [index for index in order for _ in range(group)]

        if setup.args.dataloader_drop_last and len(repeated) > size:  # otherwise later completions differ from TRL's
            repeated = repeated[: len(repeated) // size * size]
        row = RowReader(setup, "eval", dataset)
        return [list(map(row, repeated[at : at + size])) for at in range(0, len(repeated), size)]

    def arrays(self, rows: list[dict[str, Any]]) -> Batch:
        """Generate a batch's completions, and lay them out as one pass."""
        setup, task = self._setup, self._setup.task
        experience = self._source.rollout.generate_and_score(rows, task.num_generations_eval, "eval")
        layout = data.evaluation_layout(setup)
        if setup.completions_loss is not None:  # a user-defined loss takes means over rows
            layout = replace(layout, batch_size=-(-len(rows) // layout.shards) * layout.shards)
        entropy_coef = None if self._source.bonus is None else self._source.bonus.next()
        numbers = shared_numbers(task, entropy_coef, self._equals_reference)
        groups = step_examples(task, [experience.rows], [experience], 1.0, layout.shards, numbers, setup.virtual)
        arrays = layout.step([[IndexedExample(example, 0) for example in group] for group in groups], 0).arrays
        if setup.completions_loss is None:
            return arrays
        return setup.completions_loss.with_rows(arrays, [experience.rows], [experience])

    def _batch(self, rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
        setup = self._setup
        values = {} if setup.completions_loss is None else {"values": setup.completions_loss.values()}
        batch = data.placed_pass(self.arrays(rows), setup.sharding_plan)

        def computed() -> dict[str, np.ndarray]:
            sums = jax.tree.map(fetched, self.sums(setup.arrays, batch, **values))
            return sums if setup.completions_loss is None else setup.completions_loss.finish(sums)

        while True:
            try:
                return computed()
            except TraceAgain:
                self.recompile()


# Evaluation and prediction over prepared datasets.


@dataclass(frozen=True)
class MetricHooks:
    """User-defined parts of an evaluation; the first two are transformers' functions of these names.

    report: `(evaluated, dataset, prefix) -> metrics` that the trainer adds.
    """

    compute_metrics: Callable | None
    preprocess_logits_for_metrics: Callable | None
    report: Callable[[Evaluated, Any, str], dict[str, float]] | None = None


class Evaluator:
    """Runs evaluations and computes metrics with TRL's names, in TRL's order."""

    def __init__(
        self,
        setup: Setup,
        forward: Forward,
        sharded_step: ShardedStep | None,
        user_loss: UserLoss | None,
        prediction_step: Callable,
    ):
        self._setup, self._forward, self._sharded_step = setup, forward, sharded_step
        self._user_loss, self._prediction_step = user_loss, prediction_step
        self._preprocess: ArraysOrTensors | None = None
        self.recompile()

    def recompile(self) -> None:
        """Discard the compiled programs, because the task has changed."""
        setup, forward = self._setup, self._forward
        # New function objects, because JAX caches compiled programs by function.
        self._outputs = jax.jit(partial(self.outputs), static_argnames=("dtype", "bounded"))
        self._measure = jax.jit(partial(forward.measure))
        self._by_logits: LogitsEvaluation | None = None
        self._whole = WholeBatchEvaluation(setup, forward, self._sharded_step)
        self._by_script: Callable | None = None  # evaluates a batch with user-defined methods
        if "prediction_step" in setup.batch_methods:
            self._by_script = self._user_loss.prediction(self._prediction_step)
        elif setup.batch_methods:
            self._by_script = self._user_loss.evaluation()

    def evaluate(self, batches: Any, prefix: str, hooks: MetricHooks) -> tuple[dict[str, float], dict[str, float]]:
        """Evaluate the batches of get_eval_dataloader: the loss, the script's metrics and the speed, whose names start
        with `prefix`, and the task's metrics, without it."""
        start, setup = time.monotonic(), self._setup
        evaluated = self._evaluated(batches, "get_eval_dataloader", hooks)
        metrics = self._metrics(prefix, start, evaluated, self._predicted(evaluated, batches, hooks), hooks)
        sums = [batch.sums for batch in evaluated.batches]
        measured = task_metrics(setup.task, setup.objective, sums, "eval", tokens_seen=setup.progress.tokens_seen)
        if hooks.report is not None and "prediction_step" not in setup.batch_methods:
            measured |= hooks.report(evaluated, batches.dataset, prefix)
        return metrics, measured

    def predict(self, batches: Any, prefix: str, hooks: MetricHooks) -> PredictionOutput:
        """Predict the batches of get_test_dataloader, including texts longer than max_length."""
        start = time.monotonic()
        evaluated = self._evaluated(batches, "get_test_dataloader", hooks, predicts=True)
        predicted = self._predicted(evaluated, batches, hooks)
        metrics = self._metrics(prefix, start, evaluated, predicted, hooks)
        self._setup.events.fire("on_predict", metrics)
        if self._setup.args.prediction_loss_only:
            return PredictionOutput(predictions=None, label_ids=None, metrics=metrics)
        return PredictionOutput(predictions=predicted.joined, label_ids=predicted.joined_labels, metrics=metrics)

    def _metrics(
        self, prefix: str, start: float, evaluated: Evaluated, predicted: Predicted, hooks: MetricHooks
    ) -> dict[str, float]:
        """The loss, the script's metrics and the speed since `start`."""
        setup, args, of_script = self._setup, self._setup.args, {}
        if hooks.compute_metrics is not None and not args.prediction_loss_only:
            of_script = predicted.metrics(hooks.compute_metrics, args.include_for_metrics, args.batch_eval_metrics)
        examples = evaluated.num_examples
        steps = math.ceil(examples / (args.per_device_eval_batch_size * setup.shards))
        metrics = _prefixed(prefix, evaluated.loss(), of_script)
        return metrics | speed_metrics(prefix, start, num_samples=examples, num_steps=steps)

    def try_metrics(self, hooks: MetricHooks) -> None:
        """Try compute_metrics before training (see the function `try_metrics`). Skipped without compute_metrics or an
        evaluation set, or if the script overrides what the function gets."""
        setup = self._setup
        if (
            hooks.compute_metrics is None
            or setup.eval_dataset is None
            or setup.args.prediction_loss_only
            or setup.batch_methods
        ):
            return
        with setup.on_device():
            try_metrics(setup.eval_dataset, setup.args, hooks.compute_metrics, partial(self._random, hooks))

    def _random(self, hooks: MetricHooks, rows: Dataset) -> Predicted:
        """Random predictions for these rows, in the form of an evaluation's."""
        setup, task, generator = self._setup, self._setup.task, np.random.default_rng(0)
        preprocess = self._preprocessing(hooks)
        predictions, labels, losses, inputs = [], [], [], []
        loader = data.evaluation_loader(setup, rows).with_layout(layout="padded", divided=False)
        for step in loader:
            if task.head == "lm":
                prediction, label = self._logits(preprocess).random(step.arrays, generator)
            else:
                outputs = generator.standard_normal(len(task.columns.texts) * step.num_examples, np.float32)
                prediction, label = task.predictions(outputs, step.num_examples), ()
                if preprocess is not None:
                    prediction = preprocess(prediction, label)
            predictions.append(jax.tree.map(np.asarray, prediction))
            labels.append(label)
            losses.append(np.zeros(step.num_examples, np.float32))
            inputs.append(token_ids_of(loader, step.rows, setup))
        return Predicted(predictions, labels, losses, inputs, setup.args.eval_do_concat_batches, rows)

    def chunks(self, batches: Any) -> EvalChunks:
        """Group the loader's batches into chunks for evaluation."""
        setup = self._setup
        return EvalChunks(
            batches, sort=setup.model.backend.traits.batch_invariant, whole=setup.router_aux_loss_coef != 0
        )

    def outputs(self, params: dict, batch: Any, **options: Any) -> jax.Array:
        """The model's outputs `[X]` of one pass; `[shards, X]` if the run is sharded."""
        first = partial(self._first_pass, **options)
        return first(params, batch) if self._sharded_step is None else self._sharded_step.scores(first)(params, batch)

    def _first_pass(self, params: dict, batch: Any, **options: Any) -> jax.Array:
        return self._forward.outputs(params, data.first_pass(batch), **options)

    def _evaluated(self, batches: Batches, method: str, hooks: MetricHooks, *, predicts: bool = False) -> Evaluated:
        """Evaluate a loader's batches. With `predicts`, texts may be longer than max_length."""
        setup, task = self._setup, self._setup.task
        wants_logits = (predicts or hooks.compute_metrics is not None) and not setup.args.prediction_loss_only
        dtype = (None if setup.progress.in_train else setup.args.eval_dtype) or setup.args.compute_dtype
        setup.events.handler.eval_dataloader = batches
        tell_first(setup.progress.printed, "evaluation")
        steps, after_each = steps_of(batches, method), partial(setup.events.fire, "on_prediction_step")
        with setup.on_device():
            if self._by_script is not None:
                evaluate, divisor = self._by_script, num_examples_of
            elif task.head == "lm" and wants_logits:
                evaluate, divisor = self._logits(self._preprocessing(hooks)), partial(divisor_of, task)
                steps = steps.with_layout(layout="padded", divided=False)
            elif task.head == "lm" and task.axis == "read":
                evaluate, divisor = self._whole, partial(divisor_of, task)
            else:
                outputs_of = partial(self._outputs, setup.arrays, dtype=dtype, bounded=not predicts)
                place = None if setup.sharding_plan is None else self._placed
                chunks = Prefetched(self.chunks(steps), place, setup.progress.interrupts.check)
                return run_evaluation(self._checked(outputs_of), self._measure, chunks, after_each)
            return run_batches(self._checked(partial(evaluate, setup.arrays, dtype=dtype)), steps, after_each, divisor)

    def _preprocessing(self, hooks: MetricHooks) -> ArraysOrTensors | None:
        """The user-defined `preprocess_logits_for_metrics`, which may be written for tensors."""
        function = hooks.preprocess_logits_for_metrics
        if function is None:
            return None
        if self._preprocess is None or self._preprocess.function is not function:
            self._preprocess = ArraysOrTensors(function, "preprocess_logits_for_metrics")
        return self._preprocess

    def _logits(self, preprocess: Callable | None) -> LogitsEvaluation:
        """The evaluation with full logits; cached, with its compiled programs, while `preprocess` stays the same."""
        if self._by_logits is None or self._by_logits.preprocess is not preprocess:
            self._by_logits = LogitsEvaluation(self._setup, self._forward, preprocess)
        return self._by_logits

    def _checked(self, evaluate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap `evaluate` so that during training, a signal interrupts the evaluation before the next pass."""

        def checked(arrays: Any) -> Any:
            self._setup.progress.interrupts.check()
            return evaluate(arrays)

        return checked

    def _placed(self, chunk: Any) -> Any:
        place = self._setup.sharding_plan.rows
        return replace(chunk, passes=[(distributed(arrays, place), slots) for arrays, slots in chunk.passes])

    def _predicted(self, evaluated: Evaluated, batches: Batches, hooks: MetricHooks) -> Predicted:
        setup, task, preprocess = self._setup, self._setup.task, self._preprocessing(hooks)
        predictions, labels, losses, inputs = [], [], [], None
        for batch in evaluated.batches:
            if isinstance(batch.outputs, tuple):
                prediction, label = batch.outputs
            elif task.head == "lm":  # no logits were computed
                prediction, label = (), ()
            else:
                prediction, label = task.predictions(batch.outputs, batch.num_examples), ()
            if preprocess is not None and task.head == "score":
                prediction = jax.tree.map(np.asarray, preprocess(prediction, label))
            predictions.append(prediction)
            labels.append(label)
            losses.append(np.repeat(np.asarray(batch.sums["loss"], np.float32), batch.num_examples))
        if hooks.compute_metrics is not None and "inputs" in setup.args.include_for_metrics:
            inputs = [token_ids_of(batches.steps, batch.rows, setup) for batch in evaluated.batches]
        return Predicted(predictions, labels, losses, inputs, setup.args.eval_do_concat_batches, batches.dataset)


def _prefixed(prefix: str, loss: float, metrics: dict[str, float]) -> dict[str, float]:
    """Merge in TRL's order: the script's metrics that already have the prefix, the loss, the script's other metrics."""
    ready = {name: value for name, value in metrics.items() if name.startswith(f"{prefix}_")}
    others = {f"{prefix}_{name}": value for name, value in metrics.items() if name not in ready}
    return ready | {f"{prefix}_loss": loss} | others


# Evaluation with full logits, batch by batch: for predict() and compute_metrics of a language model.


class LogitsEvaluation:
    """Evaluates a batch of padded rows: `(params, arrays) -> (sums with "loss", (predictions, labels))`.

    Predictions are next-token logits, float32 `[rows, T, V]`, or the result of `preprocess` on them. Labels are int32
    `[rows, T]`, not shifted. T is the length of the longest row, rounded up to `pad_to_multiple_of`. The loss is a mean
    over targets or examples.

    As in TRL, the labels are the token ids if an example has several texts, if the task uses a reference, or if its
    loss needs per-token values. The rows are then those of the texts that count as trained on: the first texts of all
    examples, then their second texts. If TRL trains without padding, the texts of a batch are concatenated to one row.
    """

    def __init__(self, setup: Setup, forward: Forward, preprocess: Callable | None):
        """
        Args:
            preprocess: applied to logits and labels, which are JAX arrays.
        """
        self._setup, self._forward, self.preprocess, self._warned = setup, forward, preprocess, False
        columns, count = setup.task.columns, len(setup.task.columns.texts)
        self._shows_labels = count == 1 and not columns.optional and setup.task.axis == "text"  # else the token ids
        self._num_texts = columns.num_primary_texts or count
        self._virtual = setup.virtual.count
        self._one_pass = jax.jit(self._loss_of_logits, static_argnames="dtype")
        self._two_passes = jax.jit(self._loss_and_logits, static_argnames="dtype")

    def __call__(self, params: dict, arrays: Any, *, dtype: str) -> tuple:
        evaluate = self._with_labels if self._shows_labels else self._with_token_ids
        sums, logits, labels = evaluate(params, arrays, dtype)
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

    def random(self, arrays: Batch, generator: np.random.Generator) -> tuple[Any, np.ndarray]:
        """`(predictions, labels)` of a batch with random logits, in the shapes of computed ones."""
        labels = self._labels(arrays)
        vocab = self._setup.vocab_size  # a token's logits are the previous token's, shifted by one: cheap to draw
        drawn = generator.standard_normal(labels.size + vocab - 1, np.float32)
        logits = np.lib.stride_tricks.sliding_window_view(drawn, vocab).reshape(*labels.shape, vocab)
        if self.preprocess is None:
            return logits, labels
        return self.preprocess(jnp.asarray(logits), jnp.asarray(labels)), labels

    def _labels(self, arrays: Batch) -> np.ndarray:
        """The labels of a batch, in the form that scripts see."""
        if self._shows_labels:
            [inputs] = inputs_of(arrays, self._setup.task, self._virtual)
            if not self._setup.task.padding_free:
                return inputs["labels"][:, : self._length(inputs["attention_mask"].sum(axis=1).max())]
            inputs["labels"][:, 0] = IGNORED
            return self._as_one_row(inputs["labels"], inputs["attention_mask"], IGNORED)
        batch: Batch = data.first_pass(arrays)
        examples, rows = int(np.count_nonzero(batch.weight)), len(batch.weight) * self._num_texts
        tokens = of_examples(batch.tokens[:rows], self._num_texts, examples)
        lengths = of_examples(batch.lengths[:rows], self._num_texts, examples)
        return tokens[:, self._virtual :][:, : self._length(lengths.max() - self._virtual)]

    def _length(self, longest: int) -> int:
        return _row_length(longest, self._setup)

    def _as_one_row(self, values: Any, mask: np.ndarray, filler: Any) -> Any:
        """Concatenate values `[rows, T, ...]` of real tokens to `[1, tokens, ...]`, padded as TRL pads its row."""
        xp = jnp if isinstance(values, jax.Array) else np
        real = values.reshape(-1, *values.shape[2:])[np.flatnonzero(mask)]
        missing = [(0, self._length(len(real)) - len(real)), *[(0, 0)] * (real.ndim - 1)]
        return xp.pad(real, missing, constant_values=filler)[None]

    def _with_labels(self, params: dict, arrays: Any, dtype: str) -> tuple:
        labels = self._labels(arrays)
        if self._virtual or self._setup.task.compares_distributions:
            # Virtual tokens predict first tokens, which these logits lack; distillation also needs the reference's.
            batch = data.first_pass(arrays)
            sums, logits = self._two_passes(params, batch, dtype=dtype)
            logits = logits[batch.lengths > 0]
        else:
            [inputs] = inputs_of(arrays, self._setup.task)
            sums, logits = self._one_pass(params, inputs, dtype=dtype)
        if self._setup.task.padding_free:
            [inputs] = inputs_of(arrays, self._setup.task, self._virtual)
            return sums, self._as_one_row(logits, inputs["attention_mask"], 0), labels
        return sums, logits[:, : labels.shape[1]], labels

    def _loss_of_logits(self, params: dict, inputs: dict, *, dtype: str) -> tuple:
        task, labels = self._setup.task, inputs["labels"]
        weight = aux_loss_weight(self._setup.router_aux_loss_coef, 1.0)
        images, patches = inputs.get(ROW_IMAGES), inputs.get("pixel_values")
        bound = TokenModel(self._setup.model, params, dtype=dtype, aux_loss_weight=weight, images=images)
        outputs = bound(inputs["input_ids"], inputs["attention_mask"], pixel_values=patches)
        loss, sums = task_loss(task, outputs.logits, labels)
        sums |= aux_loss_sums(bound.aux_losses)
        return sums | {"loss": bound.balanced(loss, outputs.aux_loss)}, outputs.logits

    def _with_token_ids(self, params: dict, arrays: Batch, dtype: str) -> tuple:
        batch, labels = data.first_pass(arrays), self._labels(arrays)
        sums, logits = self._two_passes(params, batch, dtype=dtype)
        logits = of_examples(logits, self._num_texts, int(np.count_nonzero(batch.weight)))
        return sums, logits[:, : labels.shape[1]], labels

    def _loss_and_logits(self, params: dict, batch: Batch, *, dtype: str) -> tuple:
        """The task's loss, without full logits, and logits `[rows, T, V]` from a separate pass in TRL's form."""
        setup = self._setup
        rows = len(batch.tokens) if self._shows_labels else len(batch.weight) * self._num_texts
        outputs = self._forward.outputs(params, batch, dtype=dtype, bounded=False)
        sums = self._forward.measure(outputs, batch._replace(micro_batch=None, pass_weight=batch.weight))
        policy = params if setup.reference is None else setup.reference.split(params)[0]
        images = patches = None
        if batch.images is not None:
            images = RowImages(batch.images._replace(at=batch.images.at[:rows]), batch.positions[:rows])
            patches = batch.images.patches[0] if isinstance(batch.images, Images) else None  # None: cached features
        bound = TokenModel(setup.model, policy, dtype=dtype, images=images)
        mask = (jnp.arange(batch.tokens.shape[1]) < batch.lengths[:rows, None])[:, self._virtual :]
        return sums, bound(batch.tokens[:rows, self._virtual :], mask, pixel_values=patches).logits


# A user-defined compute_metrics is tried before training: one that expects predictions of another shape then fails
# within the first minute, not at the first evaluation.

_ROWS = 2


def try_metrics(
    eval_dataset: Any, args: BaseConfig, compute_metrics: Callable, predict: Callable[[Dataset], Predicted]
) -> None:
    """Call compute_metrics with random predictions for the first rows of the evaluation set. The model is not run.
    Output of the function is discarded, and the global random state is restored.

    Args:
        predict: rows -> random predictions.

    Raises:
        TypeError, AttributeError, LookupError, ValueError: raised by compute_metrics; a note is added. Other errors
            only lead to a warning, because two rows may be too few for the function.
    """
    dataset = next(iter(eval_dataset.values())) if isinstance(eval_dataset, dict) else eval_dataset
    if not isinstance(dataset, Dataset) or len(dataset) == 0:
        return
    rows = dataset.select(range(min(_ROWS, len(dataset))))
    predicted = predict(rows)
    try:
        with _unnoticed():
            predicted.metrics(compute_metrics, args.include_for_metrics, args.batch_eval_metrics)
    except Exception as error:
        shapes = jax.tree.map(np.shape, (predicted.joined, predicted.joined_labels))
        text = f"{len(rows)} rows of the evaluation set: predictions {shapes[0]}, label_ids {shapes[1]}, numbers drawn"
        if not isinstance(error, TypeError | AttributeError | LookupError | ValueError):
            logger.warning("compute_metrics fails on %s (%s: %s).", text, type(error).__name__, error)
            return
        error.add_note(f"compute_metrics was tried before training on {text}.")
        raise


@contextlib.contextmanager
def _unnoticed() -> Iterator[None]:
    """Discard output to stdout, and restore the global random state afterwards."""
    states = random.getstate(), np.random.get_state()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


# Evaluation of a batch in one pass, for tasks whose loss needs per-token values.


class WholeBatchEvaluation:
    """Evaluates a batch in the layout of a training step: `(params, arrays) -> (sums with "loss", {})`.

    On several devices, each computes its share of the batch. The loss is summed; the sums for metrics have a leading
    axis of shards.
    """

    def __init__(self, setup: Setup, forward: Forward, sharded_step: ShardedStep | None):
        self._setup, self._forward, self._sharded_step = setup, forward, sharded_step
        self._sums = jax.jit(self._of_batch, static_argnames="dtype")

    def __call__(self, params: dict, arrays: Batch, *, dtype: str) -> tuple[dict[str, jax.Array], dict]:
        return self._sums(params, data.placed_pass(arrays, self._setup.sharding_plan), dtype=dtype), {}

    def _of_batch(self, params: dict, batch: Batch, *, dtype: str) -> dict[str, jax.Array]:
        def measure(params: dict, batch: Batch) -> dict[str, jax.Array]:
            batch = data.first_pass(batch)
            return self._forward.measure(self._forward.outputs(params, batch, dtype=dtype), batch)

        if self._sharded_step is None:
            return measure(params, batch)
        sums = self._sharded_step.scores(measure)(params, batch)
        return sums | {"loss": sums["loss"].sum()}


# One pass over an evaluation set.


class EvaluatedBatch(NamedTuple):
    """The results of a batch, on the host.

    sums: from the loss, including `loss` itself.
    outputs: of the model.
    num_examples: real examples.
    rows: indices of the rows in the dataset.
    divisor: the number of targets or examples that the loss is a mean over.
    """

    sums: dict[str, np.ndarray]
    outputs: Any
    num_examples: int
    rows: list[int]
    divisor: float


@dataclass(frozen=True)
class Evaluated:
    """The results of all batches.

    Raises:
        ValueError: there are none.
    """

    batches: list[EvaluatedBatch]

    def __post_init__(self):
        if not self.batches:
            raise ValueError("The evaluation set has no rows.")

    @property
    def num_examples(self) -> int:
        return sum(batch.num_examples for batch in self.batches)

    def loss(self) -> float:
        """The mean loss over the whole set: the mean losses of the batches, weighted by their divisors."""
        losses = np.asarray([batch.sums["loss"] for batch in self.batches], np.float64)
        return float(np.average(losses, weights=[batch.divisor for batch in self.batches]))


def run_evaluation(
    outputs_of: Callable[[Any], jax.Array],
    measure: Callable[[np.ndarray, Any], dict[str, jax.Array]],
    chunks: Iterable[Any],
    after_each: Callable[[], None],
) -> Evaluated:
    """Evaluate every batch. The host fetches a pass's outputs while the device computes the next pass.

    Args:
        outputs_of: arrays of a pass -> the model's outputs of its slots.
        measure: outputs of a batch, the batch -> sums with `loss`.
        chunks: items have `passes`, `batches`, the `rows` of each batch, and `restored`: outputs -> outputs by batch.
        after_each: called after each batch, for progress bars.

    Raises:
        ValueError: there is no batch.
    """
    done = []
    for chunk in chunks:
        restored = chunk.restored(_outputs(outputs_of, chunk.passes))
        for outputs, batch, rows in zip(restored, chunk.batches, chunk.rows, strict=True):
            sums = jax.device_get(measure(outputs, batch))
            done.append(EvaluatedBatch(sums, outputs, batch.num_examples, rows, batch.divisor))
            after_each()
    return Evaluated(done)


def _outputs(outputs_of: Callable[[Any], jax.Array], passes: list[tuple[Any, np.ndarray]]) -> list[np.ndarray]:
    outputs = []
    for arrays, _ in passes:
        outputs.append(outputs_of(arrays))
        outputs[:-1] = jax.device_get(outputs[:-1])
    return jax.device_get(outputs)


def num_examples_of(batch: StepBatch) -> float:
    return batch.num_examples


def run_batches(
    evaluate_batch: Callable[[Any], tuple[dict[str, jax.Array], Any]],
    batches: Iterable[Any],
    after_each: Callable[[], None],
    divisor: Callable[[Any], float] = num_examples_of,
) -> Evaluated:
    """Evaluate batch by batch, with a function that returns a batch's loss and outputs together.

    Args:
        evaluate_batch: arrays -> (sums with `loss`, outputs).
        batches: items have `arrays`, `num_examples` and `rows`.
        divisor: the number that a batch's loss is a mean over.
    """
    done = []
    for batch in batches:
        sums, outputs = jax.device_get(evaluate_batch(batch.arrays))
        done.append(EvaluatedBatch(sums, outputs, batch.num_examples, batch.rows, divisor(batch)))
        after_each()
    return Evaluated(done)


def divisor_of(task: TokenTask, batch: StepBatch) -> float:
    """The number that a batch's loss is a mean over: its targets if the task is per token, else its examples."""
    if not task.per_token:
        return batch.num_examples
    return max(1, batch.num_targets)


# The predictions of an evaluation, in the form that `compute_metrics` gets.

_FILLER = -100  # transformers' padding between batches of different lengths


@dataclass
class Predicted:
    """For each batch: predictions, labels (`()` if none), its loss for each example and, if requested, its token ids.

    together: whether batches are concatenated for the script (eval_do_concat_batches).
    dataset: the evaluated dataset.
    """

    predictions: list[Any]
    labels: list[Any]
    losses: list[np.ndarray]
    inputs: list[np.ndarray] | None
    together: bool
    dataset: Any

    @property
    def joined(self) -> Any:
        """The predictions of all batches, concatenated if `together`, else as a list."""
        return _joined(self.predictions) if self.together else self.predictions

    @property
    def joined_labels(self) -> Any:
        """The labels, likewise; `()` if there are none."""
        if not np.size(self.labels[0]):
            return ()
        return _joined(self.labels) if self.together else self.labels

    def metrics(self, compute: Callable[..., dict], include: list[str], by_batch: bool) -> dict[str, float]:
        """The metrics from the user-defined `compute`, ready for JSON.

        Args:
            include: `include_for_metrics`.
            by_batch: call it for each batch; the last call, with `compute_result=True`, returns the metrics.
        """
        if not by_batch:
            return _plain(compute(self._shown(slice(None), include, join=self.together)))
        metrics: dict[str, Any] = {}
        for i in range(len(self.predictions)):
            last = i == len(self.predictions) - 1
            metrics = compute(self._shown(slice(i, i + 1), include, join=True), compute_result=last)
        return _plain(metrics)

    def _shown(self, which: slice, include: list[str], *, join: bool) -> EvalPrediction:
        def part(values):
            return _joined(values[which]) if join else values[which]

        labels = part(self.labels) if np.size(self.labels[0]) else ()
        return EvalPrediction(
            predictions=part(self.predictions),
            label_ids=labels,
            inputs=part(self.inputs) if "inputs" in include else None,
            losses=part(self.losses) if "loss" in include else None,
        )


def check_compute_metrics(compute_metrics: Any, by_batch: bool) -> None:
    """Raise ValueError if `batch_eval_metrics` is set and the function lacks the argument that it needs."""
    if by_batch and compute_metrics is not None:
        if "compute_result" not in inspect.signature(compute_metrics).parameters:
            raise ValueError(
                "batch_eval_metrics=True calls compute_metrics(predictions, compute_result=...) batch by batch, and it "
                "takes no compute_result. Add the argument, or leave batch_eval_metrics out."
            )


def token_ids_of(loader: ExampleLoader, places: list[int], setup: Setup) -> np.ndarray:
    """Token ids `[X, T]` of a batch's texts that count as trained on, padded as TRL's collators do: the first text of
    all examples, then the next one. If TRL trains without padding, they are concatenated to `[1, tokens]`.

    Args:
        places: indices of the batch's rows in the loader's dataset.
    """
    if not isinstance(loader.dataset, Dataset):
        raise ValueError("include_for_metrics=['inputs'] needs rows that can be read twice: pass a Dataset, no stream.")
    columns = setup.task.columns.texts[: setup.task.columns.num_primary_texts]
    rows = loader.dataset[places]
    if loader.columns.raw:  # rows with images are tokenized when they are loaded
        examples = [indexed.example for indexed in loader.examples(rows_of(rows), places)]
        texts = [example.texts[number] for number in range(len(columns)) for example in examples]
    else:
        texts = [ids for column in columns for ids in rows[column]]
    texts = [np.asarray(ids) for ids in texts]
    if setup.task.padding_free:
        texts = [np.concatenate(texts)]
    length = _row_length(max(map(len, texts)), setup)
    pad = setup.processing_class.pad_token_id
    return np.stack([np.pad(ids, (0, length - len(ids)), constant_values=pad) for ids in texts])


def _row_length(longest: int, setup: Setup) -> int:
    """The length of TRL's rows: `longest`, rounded up to `pad_to_multiple_of`."""
    multiple = setup.pad_to_multiple_of
    return int(longest) if multiple == "auto" else padded_length(int(longest), multiple)


def _joined(batches: list[Any]) -> Any:
    """Concatenate arrays, or tuples of arrays, along the first axis; the second axis is padded to the longest."""
    if isinstance(batches[0], tuple | list):
        return tuple(_joined(list(parts)) for parts in zip(*batches, strict=True))
    arrays = [np.asarray(batch) for batch in batches]
    if arrays[0].ndim < 2:
        return np.concatenate(arrays)
    longest = max(array.shape[1] for array in arrays)

    def filled(array):
        missing = [(0, 0), (0, longest - array.shape[1]), *[(0, 0)] * (array.ndim - 2)]
        return np.pad(array, missing, constant_values=_FILLER)

    return np.concatenate([filled(array) for array in arrays])


def _plain(metrics: dict[str, Any]) -> dict[str, float]:
    on_host = {name: np.asarray(v) if isinstance(v, jax.Array) else v for name, v in metrics.items()}
    return denumpify_detensorize(on_host)  # logs and states are written as JSON
