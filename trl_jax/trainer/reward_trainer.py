"""Reward models from preference pairs: TRL's RewardTrainer on JAX."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import EvalPrediction

from trl_jax.core.files import write_whole
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.tasks.reward import RewardTask
from trl_jax.trainer.arguments import accepting_old_keywords, as_config
from trl_jax.trainer.base_trainer import BaseTrainer
from trl_jax.trainer.collators import AcceptedCollators
from trl_jax.trainer.collators import RewardDataCollator as DataCollatorForPreference
from trl_jax.trainer.overrides import TrainerTraits
from trl_jax.trainer.reward_config import RewardConfig
from trl_jax.training.evaluate import Evaluated, MetricHooks

if TYPE_CHECKING:
    from trl_jax.legacy.collators import RewardDataCollatorWithPadding

_BINS = 10  # of the calibration error
_WIDTH, _HEIGHT, _BARS = 480, 200, 24  # of the histogram


class RewardTrainer(BaseTrainer):
    """Trains a sequence classifier with one label to score the chosen answer of each pair above the rejected one.

    The arguments are TRL's, in TRL's order.

    Args:
        model: a checkpoint's folder or Hub name, a model that `trl_jax.AutoModelForSequenceClassification` loaded (its
            config gets the tokenizer's pad token, and its params become the trained weights), or a torch model of
            transformers, which receives the trained weights after `train()`. Weights are kept in float32 and saved in
            `args.model_init_kwargs["dtype"]` ("float32" by default).
        args: a RewardConfig; None means `RewardConfig("<model>-Reward")`.
        train_dataset: pairs in any format that TRL accepts, a Dataset or an IterableDataset (with `max_steps`).
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; loaded with the model if None. Its pad token is set if it has none.
        compute_metrics: gets an EvalPrediction with all scores `[2N, 1]` and label_ids `()`.
        callbacks: transformers callbacks, in addition to the default ones.
        preprocess_logits_for_metrics: applied to each batch's scores `[2P, 1]`, with labels `()`.
        optimizers: an optax transformation that includes its learning rate, and None or a function of the step. The
            function scales the updates; without it, the schedule of `args` does, relative to its peak.
        optimizer_cls_and_kwargs: an optax factory, or a torch optimizer that has a counterpart, and its arguments.
        data_collator: a DataCollatorForPreference or early TRL's RewardDataCollatorWithPadding; only its
            `pad_to_multiple_of` is used.
        quantization_config: our or transformers' BitsAndBytesConfig, which loads the base model of an adapter in 4 or 8
            bits (QLoRA).
        peft_config: our or peft's LoraConfig: an adapter of the frozen model is trained, and only the adapter is saved.

    Raises:
        TypeError, ValueError: names the invalid argument, row or checkpoint.
    """

    _name, _tag_names = "Reward", ["trl", "reward-trainer"]
    config_class = RewardConfig
    _traits = TrainerTraits(
        collators=AcceptedCollators(DataCollatorForPreference, older=("RewardDataCollatorWithPadding",))
    )

    @accepting_old_keywords("max_length")
    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel,
        args: RewardConfig | None = None,
        data_collator: DataCollatorForPreference | RewardDataCollatorWithPadding | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: Any = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[np.ndarray, tuple], np.ndarray] | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
    ):
        args = None if args is None else as_config(args, RewardConfig)
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class,
            compute_metrics, callbacks, optimizers, optimizer_cls_and_kwargs, preprocess_logits_for_metrics,
            quantization_config, peft_config,
        )  # fmt: skip

    def make_task(self) -> RewardTask:
        return RewardTask(self.args.center_rewards_coefficient)

    def _metric_hooks(self) -> MetricHooks:
        report = self._report if self.args.eval_report else None
        return MetricHooks(self.compute_metrics, self.preprocess_logits_for_metrics, report)

    def _report(self, evaluated: Evaluated, dataset: Any, prefix: str) -> dict[str, float]:
        """The additional metrics of `eval_report`, which TRL does not have."""
        args, task = self.args, self._setup.task
        scores = [task.predictions(batch.outputs, batch.num_examples)[:, 0] for batch in evaluated.batches]
        margins = np.concatenate([np.subtract(*np.split(batch, 2)) for batch in scores])
        subsets = None
        if isinstance(dataset, Dataset) and args.eval_subset_column in dataset.column_names:
            rows = [row for batch in evaluated.batches for row in batch.rows]
            subsets = dataset[rows][args.eval_subset_column]
        return eval_report(margins, subsets, prefix=prefix, folder=Path(args.output_dir))


# `eval_report=True`: accuracy by subset, calibration and a histogram of margins in each evaluation.


def eval_report(margins: np.ndarray, subsets: list[Any] | None, *, prefix: str, folder: Path) -> dict[str, float]:
    """Compute metrics of an evaluation's pairs, and write `<prefix>_margins.svg` to the folder if any margin is finite.

    Args:
        margins: `[N]`, chosen score minus rejected score.
        subsets: `[N]`, the subset of each pair; None if there are no subsets.

    Returns:
        `ece` and, with subsets, `accuracy_<subset>` of each and their mean `accuracy_of_subsets`, as in RewardBench.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finite = margins[np.isfinite(margins)]
    if len(finite):
        write_whole(folder / f"{prefix}_margins.svg", histogram(finite))
    metrics = {"ece": calibration_error(margins)}
    if subsets is not None:
        names = np.asarray(list(map(str, subsets)))
        parts = {name: float(np.mean(margins[names == name] > 0)) for name in sorted(set(names))}
        metrics |= {f"accuracy_{name}": value for name, value in parts.items()}
        metrics["accuracy_of_subsets"] = float(np.mean(list(parts.values())))
    return metrics


def calibration_error(margins: np.ndarray) -> float:
    """Expected calibration error (Guo et al. 2017, arXiv:1706.04599, equation 3) in ten bins from 0.5 to 1.

    The confidence of a Bradley-Terry model in the completion it prefers is sigmoid(|margin|).

    Args:
        margins: `[N]`; a NaN among them makes the result NaN.
    """
    if np.isnan(margins).any():
        return float("nan")
    confidence, right = 1 / (1 + np.exp(-np.abs(margins))), margins > 0
    bins = np.minimum(((confidence - 0.5) * 2 * _BINS).astype(int), _BINS - 1)
    gaps = [
        abs(np.mean(confidence[bins == b]) - np.mean(right[bins == b])) * np.mean(bins == b) for b in np.unique(bins)
    ]
    return float(sum(gaps))


def histogram(margins: np.ndarray) -> str:
    """A histogram of finite margins `[N]`, N > 0, as SVG; negative margins (wrong pairs) are red."""
    edge = float(np.max(np.abs(margins))) or 1.0
    counts, edges = np.histogram(margins, bins=_BARS, range=(-edge, edge))
    width, highest = _WIDTH / _BARS, max(counts.max(), 1)
    bars = [
        f'<rect x="{i * width:.1f}" y="{_HEIGHT - count * _HEIGHT / highest:.1f}" width="{width - 1:.1f}" '
        f'height="{count * _HEIGHT / highest:.1f}" fill="{"#c44" if edges[i + 1] <= 1e-12 else "#48a"}"/>'
        for i, count in enumerate(counts)
    ]
    labels = [
        f'<text x="{x}" y="{_HEIGHT + 16}" text-anchor="{anchor}">{text}</text>'
        for x, anchor, text in (
            (0, "start", f"{-edge:.2f}"),
            (_WIDTH / 2, "middle", f"margin of {len(margins)} pairs, {np.mean(margins > 0):.1%} above 0"),
            (_WIDTH, "end", f"{edge:.2f}"),
        )
    ]
    size = f'width="{_WIDTH}" height="{_HEIGHT + 24}" font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(bars)}{"".join(labels)}</svg>\n'
