"""The methods of a trainer that evaluate and predict."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from transformers.trainer_utils import PredictionOutput

from trl_jax.engine.devices.processes import together
from trl_jax.run.evaluation.evaluation import MetricHooks
from trl_jax.run.user_loss.bound_model import BoundModel
from trl_jax.trainer.shared.refusals import NEVER_CALLED, NEVER_READ, ONCE_CALLED, refuse
from trl_jax.trainer.shared.surface import Surface


class Evaluating(Surface):
    """Evaluates and predicts with the model as it is.

    Attributes:
        compute_metrics, preprocess_logits_for_metrics: as they were passed; a script may set others.
    """

    _never_called: ClassVar[Mapping[str, str]] = NEVER_CALLED  # methods of TRL's that a script may not override
    _once_called: ClassVar[Mapping[str, str]] = ONCE_CALLED  # the same of earlier releases
    _never_read: ClassVar[Mapping[str, str]] = NEVER_READ  # attributes of TRL's that a script may not set
    _settle_task: Callable[[], None]  # of `BaseTrainer`
    compute_loss: Callable  # of `BaseTrainer`, or a script's own
    compute_metrics: Callable | None
    preprocess_logits_for_metrics: Callable | None

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss and metrics over a dataset, raw or prepared; `eval_dataset` of the constructor if none is given.

        A dict of datasets is evaluated one by one, `<prefix>_<name>_...` each; a string picks one of the constructor's.
        """
        refuse(ignore_keys=ignore_keys)
        self._settle_task()
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

    def _evaluate_one(self, dataset: Any, prefix: str) -> dict[str, float]:
        with together(), self._model_at_rest():
            metrics = self.parts.evaluator.evaluate(self.get_eval_dataloader(dataset), prefix, self._metric_hooks())
            self.log(metrics)
            if self.state.epoch is not None:
                metrics["epoch"] = self.state.epoch
            self._run.events.fire("on_evaluate", metrics)
        return metrics

    @contextlib.contextmanager
    def _model_at_rest(self) -> Iterator[None]:
        """`model.training` is False meanwhile, as scripts' methods that are called on the way may ask."""
        self._run.model.eval()
        try:
            yield
        finally:
            self._run.model.train(self._run.progress.in_train)

    def _metric_hooks(self) -> MetricHooks:
        return MetricHooks(self.compute_metrics, self.preprocess_logits_for_metrics)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """The task's predictions for every row of a dataset, raw or prepared; of those longer than max_length, too.

        Returns:
            `predictions`, batch by batch in the order of the task's outputs; `label_ids`, which are `()` unless the
            task has labels; `metrics` has the loss and the speed.
        """
        refuse(ignore_keys=ignore_keys)
        self._settle_task()
        prepared = self.prepare_dataset(test_dataset, "test", bounded=False)
        loader = self.get_test_dataloader(prepared)
        with together(), self._model_at_rest():
            return self.parts.evaluator.predict(loader, metric_key_prefix, self._metric_hooks())

    def prediction_step(
        self,
        model: BoundModel,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple:
        """(loss, logits, labels) of one batch. Where a script overrides it, evaluation calls it every time.

        Logits are `[X, 1]` and labels None under a score head, `[rows, T, V]` and `[rows, T]` of a language model.
        """
        refuse(ignore_keys=ignore_keys)
        loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return (loss, None, None) if prediction_loss_only else (loss, outputs["logits"], inputs.get("labels"))
