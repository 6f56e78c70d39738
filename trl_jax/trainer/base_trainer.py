"""What every trainer shares: one run from arguments to a saved folder."""

from __future__ import annotations

import abc
import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from datasets import Dataset, IterableDataset
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_utils import (
    EvalPrediction,
    PredictionOutput,
    SaveStrategy,
    TrainOutput,
    speed_metrics,
)

from trl_jax.data.order import plan
from trl_jax.engine.checkpoint import forget_all_but_best, save_checkpoint
from trl_jax.engine.evaluation import Evaluated, run_evaluation
from trl_jax.engine.events import Events
from trl_jax.engine.loop import Loop
from trl_jax.engine.optim import adamw, decays
from trl_jax.engine.schedules import learning_rates
from trl_jax.engine.step import make_step
from trl_jax.hub.loading import load
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.trainer.base_config import BaseConfig


class BaseTrainer(abc.ABC):
    """Trains `model` on prepared datasets. A trainer explains how a row becomes tokens and a batch becomes a loss.

    Public attributes are those scripts read from transformers' Trainer: model, args, processing_class, train_dataset,
    eval_dataset, callback_handler, state, control.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: BaseConfig,
        train_dataset: Dataset | IterableDataset,
        eval_dataset: Any,
        processing_class: Any,
        compute_metrics: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        preprocess_logits_for_metrics: Any = None,
    ):
        args.check()  # again: setters and plain assignment get past the check at construction
        if args.eval_strategy != "no" and eval_dataset is None:
            raise ValueError(
                f"eval_strategy={str(args.eval_strategy.value)!r} needs an eval_dataset. Pass one, or set "
                "eval_strategy='no'."
            )
        if args.save_strategy == SaveStrategy.BEST and args.metric_for_best_model is None:
            raise ValueError(
                "save_strategy='best' needs metric_for_best_model, which is None: say which metric of the "
                "evaluation decides, as in metric_for_best_model='loss'."
            )
        self.model, self.args, self.processing_class = model, args, processing_class
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.is_in_train = False
        # A second train() goes on with both, as TRL's does.
        self._tokens_seen, self._optimizer_state = 0, None
        self._evaluate_batch = jax.jit(self._evaluation_step, static_argnames="dtype")
        self._events = Events(
            self._callback_handler(callbacks), args, TrainerState(stateful_callbacks=[]), TrainerControl()
        )
        self._new_state()
        os.makedirs(args.output_dir, exist_ok=True)
        self._events.fire("on_init_end")

    # ---- what a trainer explains -------------------------------------------------------------------------------

    @abc.abstractmethod
    def loss(self, params: dict, batch: Any, key: jax.Array | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Loss and metrics (sums and counts) of one micro-batch; `key` is for dropout, None without it."""

    @abc.abstractmethod
    def evaluation_loss(self, params: dict, batch: Any, dtype: str) -> tuple[dict[str, jax.Array], jax.Array]:
        """Metrics of one batch, `loss` (a mean) among them, and its scores, computed in `dtype`."""

    @abc.abstractmethod
    def prepare_dataset(self, dataset: Any, name: str) -> Dataset | IterableDataset:
        """Rows as the loader takes them. Preparing twice is preparing once."""

    @abc.abstractmethod
    def loader(self, dataset: Any, *, training: bool) -> Any:
        """Step batches over a prepared dataset."""

    @abc.abstractmethod
    def training_metrics(self, steps: list[dict[str, np.ndarray]]) -> dict[str, float]:
        """What is logged of the steps since the last log, beside loss, grad_norm and learning_rate."""

    @abc.abstractmethod
    def evaluation_metrics(self, evaluated: Evaluated) -> dict[str, float]:
        """What is logged of an evaluation, beside its loss."""

    @abc.abstractmethod
    def real_scores(self, scores: np.ndarray, num_pairs: int) -> np.ndarray:
        """The rows of one batch's scores that belong to real pairs."""

    # ---- training ----------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the end. Returns the steps taken, the mean loss, and the run's metrics.

        Raises:
            ValueError: `resume_from_checkpoint` is set: this release does not resume.
        """
        if resume_from_checkpoint:
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: this release of trl_jax does not resume runs. A "
                "checkpoint's folder can be passed as model= to go on from its weights."
            )
        _refuse(trial=trial, ignore_keys_for_eval=ignore_keys_for_eval)
        with self._on_device():
            return self._train()

    def _train(self) -> TrainOutput:
        args, start = self.args, time.time()
        self._new_state()
        run = plan(
            len(self.train_dataset) if isinstance(self.train_dataset, Dataset) else None,
            batch_size=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            drop_last=args.dataloader_drop_last,
            epochs=args.num_train_epochs,
            max_steps=args.max_steps,
        )
        self.state.max_steps, self.state.num_train_epochs = run.max_steps, run.num_epochs
        self.state.compute_steps(args, run.max_steps)
        loader, rates = self.get_train_dataloader(), self._learning_rates(run.max_steps)
        self.callback_handler.train_dataloader = loader
        loop = Loop(
            events=self._events,
            batches=loader,
            num_epochs=run.num_epochs,
            micro_batches_per_epoch=run.micro_batches_per_epoch,
            advance=self._advancer(),
            learning_rate=rates,
            report=self._report,
            evaluate=self.evaluate,
            save=self._save_checkpoint,
        )
        self.is_in_train = True
        try:
            train_loss, unreported = loop.run()
        finally:
            self.is_in_train = False
        return self._finish(train_loss, self._measured(unreported), start, run.max_steps)

    def _advancer(self) -> Any:
        """(step batch, learning rate) -> metrics. Replaces the model's parameters by their successors."""
        tx = self.create_optimizer()
        step = make_step(self.loss, tx)
        if self._optimizer_state is None:
            self._optimizer_state = tx.init(self.model.params)
        key = None if self.args.disable_dropout else jax.random.key(self.args.seed)
        flops_a_token = 6 * self.model.num_parameters(exclude_embeddings=True)

        def advance(batch, learning_rate):
            step_key = None if key is None else jax.random.fold_in(key, self.state.global_step)
            rate = np.float32(learning_rate)
            self.model.params, self._optimizer_state, metrics = step(
                self.model.params, self._optimizer_state, batch.arrays, rate, step_key
            )
            self._tokens_seen += batch.num_tokens
            self.state.total_flos += flops_a_token * batch.num_padded_tokens
            return metrics

        return advance

    def create_optimizer(self) -> Any:
        """The optax transformation of `args.optim`."""
        args, source = self.args, self.model.source
        return adamw(
            b1=args.adam_beta1,
            b2=args.adam_beta2,
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
            decayed={wire.path: decays(wire.tensor) for wire in source.wires},
            max_grad_norm=args.max_grad_norm,
        )

    def _learning_rates(self, max_steps: int) -> Any:
        args = self.args
        return learning_rates(
            args.lr_scheduler_type.value,
            peak=args.learning_rate,
            warmup_steps=args.get_warmup_steps(max_steps),
            max_steps=max_steps,
            kwargs=args.lr_scheduler_kwargs,
        )

    def _report(self, logs: dict[str, float], steps: list[dict[str, np.ndarray]]) -> None:
        self.log(logs | self._measured(steps))

    def _measured(self, steps: list[dict[str, np.ndarray]]) -> dict[str, float]:
        return {"num_tokens": float(self._tokens_seen)} | self.training_metrics(steps) if steps else {}

    def _finish(self, train_loss: float, measured: dict[str, float], start: float, max_steps: int) -> TrainOutput:
        args, state = self.args, self.state
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * max_steps
        if isinstance(self.train_dataset, Dataset) and args.max_steps <= 0:
            rows = len(self.train_dataset) * args.num_train_epochs
        rows *= state.global_step / max(max_steps, 1)
        metrics = speed_metrics("train", start, num_samples=rows, num_steps=state.global_step)
        metrics |= {"total_flos": state.total_flos, "train_loss": train_loss} | measured
        self.log(metrics)
        metrics["epoch"] = state.epoch
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self.model.params, _ = load(Path(state.best_model_checkpoint), dtype="auto", seed=args.seed)
        if args.save_total_limit == 1 and state.best_model_checkpoint is not None:
            forget_all_but_best(args.output_dir, state.best_model_checkpoint)
        self._events.fire("on_train_end")
        return TrainOutput(state.global_step, train_loss, metrics)

    # ---- evaluation --------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss and metrics over a dataset, raw or prepared; `eval_dataset` of the constructor if none is given.

        A dict of datasets is evaluated one by one, `<prefix>_<name>_...` each; a string picks one of the constructor's.
        """
        _refuse(ignore_keys=ignore_keys)
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            metrics = {}
            for name, part in dataset.items():
                part = part if eval_dataset is None else self.prepare_dataset(part, name)
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
        """Scores of every pair of a dataset, raw or prepared.

        Returns:
            `predictions` float32 `[2N, 1]`, batch by batch: the chosen answers of a batch, then its rejected ones;
            `label_ids` is `()`; `metrics` has the loss and the speed.
        """
        _refuse(ignore_keys=ignore_keys)
        start = time.time()
        loader = self.get_test_dataloader(self.prepare_dataset(test_dataset, "test"))
        evaluated, predictions = self._run_evaluation(loader)
        metrics = _prefixed(metric_key_prefix, evaluated.loss(), self._own_metrics(predictions))
        metrics |= self._speed(metric_key_prefix, start, evaluated)
        self._events.fire("on_predict", metrics)
        return PredictionOutput(predictions=predictions, label_ids=(), metrics=metrics)

    def _evaluate_one(self, dataset: Any, prefix: str) -> dict[str, float]:
        start = time.time()
        evaluated, predictions = self._run_evaluation(self.get_eval_dataloader(dataset))
        own = {} if self.args.prediction_loss_only else self._own_metrics(predictions)
        metrics = _prefixed(prefix, evaluated.loss(), own) | self._speed(prefix, start, evaluated)
        measured = {"num_tokens": float(self._tokens_seen)} | self.evaluation_metrics(evaluated)
        metrics |= {f"{prefix}_{name}": value for name, value in measured.items()}
        self.log(metrics)
        if self.state.epoch is not None:
            metrics["epoch"] = self.state.epoch
        self._events.fire("on_evaluate", metrics)
        return metrics

    def _run_evaluation(self, loader: Any) -> tuple[Evaluated, np.ndarray]:
        """Every batch's results, and the predictions as compute_metrics gets them."""
        in_full = None if self.is_in_train else self.args.eval_dtype
        dtype = in_full or self.args.compute_dtype
        self.callback_handler.eval_dataloader = loader
        with self._on_device():
            evaluated = run_evaluation(
                lambda arrays: self._evaluate_batch(self.model.params, arrays, dtype=dtype),
                loader,
                after_each=lambda: self._events.fire("on_prediction_step"),
            )
        batches = [self.real_scores(*batch) for batch in zip(evaluated.scores, evaluated.num_pairs, strict=True)]
        if self.preprocess_logits_for_metrics is not None:
            batches = [np.asarray(self.preprocess_logits_for_metrics(logits, ())) for logits in batches]
        return evaluated, np.concatenate(batches)

    def _evaluation_step(self, params: dict, batch: Any, *, dtype: str) -> Any:
        first = jax.tree.map(lambda leaf: leaf[0], batch)
        return self.evaluation_loss(params, first, dtype)

    def _own_metrics(self, predictions: np.ndarray) -> dict[str, float]:
        if self.compute_metrics is None:
            return {}
        return dict(self.compute_metrics(EvalPrediction(predictions=predictions, label_ids=())))

    def _speed(self, prefix: str, start: float, evaluated: Evaluated) -> dict[str, float]:
        steps = math.ceil(evaluated.total_pairs / self.args.per_device_eval_batch_size)
        return speed_metrics(prefix, start, num_samples=evaluated.total_pairs, num_steps=steps)

    # ---- dataloaders, logs, files ------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Step batches of the training set; `set_epoch` chooses the order."""
        return self.loader(self.train_dataset, training=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Batches of a prepared evaluation set, in its order; a string picks one of the constructor's."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        return self.loader(self.eval_dataset if eval_dataset is None else eval_dataset, training=False)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Batches of a prepared dataset, in its order."""
        return self.loader(test_dataset, training=False)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Put `logs` into `state.log_history` with the epoch and step, and hand them to the callbacks."""
        if self.state.epoch is not None:
            logs = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._events.fire("on_log", logs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder that transformers loads: config, weights, tokenizer, and training_args.json."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        self.model.save_pretrained(folder)
        self.processing_class.save_pretrained(folder)
        arguments = json.dumps(_without_tokens(self.args.to_dict()), indent=2)
        (folder / "training_args.json").write_text(arguments + "\n", encoding="utf-8")

    def _save_checkpoint(self) -> None:
        save_checkpoint(self.args.output_dir, lambda folder: self.save_model(folder, _internal_call=True), self._events)

    # ---- callbacks and state -----------------------------------------------------------------------------------

    @property
    def state(self) -> TrainerState:
        return self._events.state

    @property
    def control(self) -> TrainerControl:
        return self._events.control

    @property
    def callback_handler(self) -> CallbackHandler:
        return self._events.handler

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Add a callback, as a class or an instance."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> TrainerCallback | None:
        """Remove a callback and return it; None if there was none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Remove a callback."""
        self.callback_handler.remove_callback(callback)

    def is_local_process_zero(self) -> bool:
        return True

    def is_world_process_zero(self) -> bool:
        return True

    def _callback_handler(self, callbacks: list[TrainerCallback] | None) -> CallbackHandler:
        from transformers.integrations import get_reporting_integration_callbacks

        reporters = get_reporting_integration_callbacks(self.args.report_to)
        handler = CallbackHandler(
            [DefaultFlowCallback, *reporters, *(callbacks or [])], self.model, self.processing_class, None, None
        )
        handler.add_callback(PrinterCallback if self.args.disable_tqdm else ProgressCallback)
        return handler

    def _new_state(self) -> None:
        kept = [c for c in [*self.callback_handler.callbacks, self.control] if isinstance(c, ExportableState)]
        self._events.state = TrainerState(stateful_callbacks=kept)
        self.state.train_batch_size = self.args.per_device_train_batch_size

    @contextlib.contextmanager
    def _on_device(self):
        """The device of the run, and float32 products as exact as torch's unless tf32 was asked for."""
        precision = "tensorfloat32" if self.args.tf32 and self.args.device.type == "cuda" else "float32"
        with jax.default_device(run_device(self.args)), jax.default_matmul_precision(precision):
            yield


def run_device(args: BaseConfig) -> jax.Device:
    """The one device a run of this release uses."""
    return jax.devices("cpu")[0] if args.use_cpu else jax.devices()[0]


def _prefixed(prefix: str, loss: float, own: dict[str, float]) -> dict[str, float]:
    """In TRL's order: the user's metrics that have the prefix already, the loss, the user's others."""
    ready = {name: value for name, value in own.items() if name.startswith(f"{prefix}_")}
    others = {f"{prefix}_{name}": value for name, value in own.items() if name not in ready}
    return ready | {f"{prefix}_loss": loss} | others


def _without_tokens(values: dict[str, Any]) -> dict[str, Any]:
    """The dict without access tokens in the dicts it holds; transformers has hidden its own."""
    return {
        name: {**value, "token": "<TOKEN>"} if isinstance(value, dict) and "token" in value else value
        for name, value in values.items()
    }


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} is not supported by this release of trl_jax. Leave it out.")
