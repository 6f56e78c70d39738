"""The datasets of a run: prepared, and loaded in batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from datasets import Dataset, IterableDataset
from jax._src import xla_bridge  # the one place where JAX says whether it has started

from trl_jax.core.outputs import VirtualTokens
from trl_jax.data.batch import Batch, Columns, Example
from trl_jax.data.checks import argument, check_labels, check_token_ids
from trl_jax.data.layout_plan import LayoutPlan
from trl_jax.data.loader import ExampleLoader, RunLength, StepLayout, Weighting, run_length
from trl_jax.mesh.mesh import SEQUENCE, distributed
from trl_jax.tasks.task import Task
from trl_jax.training import layout
from trl_jax.training.logging import tell
from trl_jax.training.script_loss import inputs_of
from trl_jax.training.state import RunState

# ----------------------------------------------------------------------------------------------------
# The datasets of a run: preparing them, and loading them in batches.


logger = logging.getLogger(__name__)
_FEW_ROWS = 1_000  # are tokenised before processes have started


def prepare(run: RunState, dataset: Any, name: str, *, bounded: bool = True) -> Dataset | IterableDataset:
    """Prepare rows for the loader; `bounded` leaves out those longer than max_length."""
    if run.encoder is not None:
        return dataset  # rows with images become examples in the loader
    prepared = run.task.prepare(
        dataset,
        run.processing_class,
        max_length=run.args.max_length if bounded else None,
        num_proc=_forked_processes(run, dataset, name),
        name=name,
    )
    columns = run.task.columns
    prepared = check_token_ids(prepared, columns.texts, run.vocab_size, name, run.max_positions)
    prepared = check_labels(prepared, columns, run.vocab_size, name) if columns.labels else prepared
    return prepared if run.finish_rows is None else run.finish_rows(prepared, name)


def _forked_processes(run: RunState, dataset: Any, name: str) -> int | None:
    """`dataset_num_proc` while JAX has not started; beside its threads a fork can deadlock, so rows are then tokenised
    in this process, to the same."""
    asked = run.args.dataset_num_proc
    if not asked or not xla_bridge.backends_are_initialized():
        return asked
    if isinstance(dataset, Dataset) and len(dataset) > _FEW_ROWS and "num_proc" not in run.progress.told:
        run.progress.told.add("num_proc")
        logger.warning(
            "dataset_num_proc=%d: %s is tokenised in this process alone: JAX runs in it already, and processes that "
            "fork beside its threads can deadlock. A trainer that is given its model's name, and is the first of its "
            "process, tokenises before JAX starts.",
            asked,
            argument(name),
        )
    return None


def length_of(run: RunState) -> RunLength:
    """The length of the run, by its arguments and its training set."""
    args = run.args
    if run.task.online:
        rows = run.train_dataset
        micro_batches = run.task.cycle.micro_batches(len(rows)) if isinstance(rows, Dataset) else None
        lengths = {"epochs": args.num_train_epochs, "max_steps": args.max_steps, "drop_last": False}
        return run_length(micro_batches, batch_size=1, accumulation=args.gradient_accumulation_steps, **lengths)
    return run_length(
        len(run.train_dataset) if isinstance(run.train_dataset, Dataset) else None,
        batch_size=run.micro_batch_examples,
        accumulation=args.gradient_accumulation_steps,
        drop_last=args.dataloader_drop_last,
        epochs=args.num_train_epochs,
        max_steps=args.max_steps,
    )


def order_of(run: RunState) -> dict[str, Any]:
    """The arguments that the order of a table's rows within an epoch follows; none of them for a stream."""
    args, rows = run.args, run.train_dataset
    if not isinstance(rows, Dataset):
        return {}
    order = {"train_sampling_strategy": args.train_sampling_strategy}
    if args.train_sampling_strategy != "sequential":
        order["data_seed"] = _order_seed(run)
    if args.train_sampling_strategy == "group_by_length":
        order["examples a step"] = run.step_examples
        order["length_column_name"] = args.length_column_name if args.length_column_name in rows.column_names else None
    return order


def _order_seed(run: RunState) -> int:
    return run.args.seed if run.args.data_seed is None else run.args.data_seed


def loader(
    run: RunState, dataset: Dataset | IterableDataset, *, training: bool, virtual: VirtualTokens | None = None
) -> ExampleLoader:
    """Step batches over a prepared dataset; None: `virtual` are those of the run's model."""
    args, raw = run.args, run.encoder is not None
    lengths = _lengths(run, dataset) if training and args.train_sampling_strategy == "group_by_length" else None
    plan = _planned(run, dataset, lengths) if training and not run.own_loss and not raw else None
    return ExampleLoader(
        dataset,
        columns_of(run, dataset),
        example_maker(run, run.virtual if virtual is None else virtual),
        step_layout(run, plan, training=training),
        fill_last=run.progress.fill_last if training else False,
        shuffle=training and args.train_sampling_strategy != "sequential",
        seed=_order_seed(run),
        lengths=lengths,
        # No row of an evaluation is dropped and, as in TRL, none of a stream.
        drop_last=training and args.dataloader_drop_last and isinstance(dataset, Dataset),
        where=argument("train" if training else "eval") if raw else "",
    )


def columns_of(run: RunState, dataset: Dataset | IterableDataset) -> Columns:
    """The columns that a step uses: the task's, or those of rows with images."""
    return run.task.columns if run.encoder is None else Columns((), raw=tuple(dataset.column_names or ()))


def example_maker(run: RunState, virtual: VirtualTokens) -> Callable[[dict[str, Any]], Example]:
    """The function that makes an example of a row, as a model with these virtual tokens reads it."""
    task, encoder, max_length = run.task, run.encoder, run.args.max_length
    if encoder is not None:
        return lambda row: task.image_example(row, encoder, max_length)
    if not virtual.count:
        return task.example
    return lambda row: task.example(row).behind(virtual, predicted=task.predicts_first)


def placed_pass(run: RunState, arrays: Batch) -> Batch:
    """A step's only pass where `ShardedStep.scores` takes it: arrays `[shards, ...]`."""
    arrays = only_pass(run, arrays)
    return arrays if run.sharding_plan is None else distributed(arrays, run.sharding_plan.rows)


def only_pass(run: RunState, arrays: Batch) -> Batch:
    """The same on the host."""
    return jax.tree.map(lambda leaf: leaf[0], arrays) if run.shards > 1 else arrays


def reason_of_layout(run: RunState) -> str:
    """Why the run's layout, without a survey of lengths, is another than asked for; "" where it is not."""
    options = {"striped": _striped(run), "branches": run.task.online}
    return layout.exact_layout(run.args, run.model.backend, **options)[1]


def step_layout(run: RunState, plan: LayoutPlan | None = None, *, training: bool) -> StepLayout:
    """How the run lays out its steps, whoever makes the examples.

    Args:
        plan: the layout, where lengths were surveyed; None takes the run's layout with buckets for any lengths.
        training: micro-batches of training and as many as a step has; otherwise those of an evaluation, one at a time.
    """
    args, user_loss = run.args, bool(run.own_loss)
    if user_loss:
        plan = LayoutPlan("padded")  # scripts get rows
    elif plan is None:
        branches = run.task.online
        options = {"striped": _striped(run), "branches": branches, "compares": run.compares}
        plan = layout.unplanned(args, run.model.backend, **options)
    return StepLayout(
        batch_size=run.micro_batch_examples if training else args.per_device_eval_batch_size * run.shards,
        pad_token_id=run.processing_class.pad_token_id,
        pad_to_multiple_of=run.pad_to_multiple_of,
        layout=plan.layout,
        buckets=plan.buckets,
        weighting=_weighting(run),
        views=plan.views,
        accumulation=args.gradient_accumulation_steps if training else 1,
        by_micro_batch=_by_micro_batch(run),
        shards=run.shards,
        divided=not user_loss,
        trains=training,
        padding_free=run.task.padding_free,
    )


def _weighting(run: RunState) -> Weighting:
    """How the loss of a step weighs its examples."""
    if run.task.head == "score" or not run.task.per_token:
        return "examples"
    return "tokens" if run.args.average_tokens_across_devices else "shards"


def _by_micro_batch(run: RunState) -> bool:
    """Whether the loss needs the examples of a micro-batch together."""
    return run.task.head == "lm" and (run.task.by_micro_batch or run.router_aux_loss_coef != 0)


def _striped(run: RunState) -> bool:
    """Whether a mesh divides texts over devices."""
    return run.sharding_plan is not None and run.sharding_plan.size(SEQUENCE) > 1


def _planned(run: RunState, dataset: Any, lengths: np.ndarray | None) -> LayoutPlan:
    """The layout of the training set, by how long its texts are."""
    return layout.plan(
        run.args,
        run.model.backend,
        dataset,
        run.task.columns.texts,
        parameters=run.model.num_parameters(exclude_embeddings=True),
        batch_size=run.train_batch_size,
        steps=length_of(run).max_steps,
        shards=run.shards,
        striped=_striped(run),
        by_micro_batch=_by_micro_batch(run),
        documents=run.task.columns.documents,
        compares=run.compares,
        lengths=lengths,
        tell=partial(tell, run, "layout"),
    )


def _lengths(run: RunState, dataset: Dataset | IterableDataset) -> np.ndarray | None:
    """The length of each row `[rows]`: of its longest text, or by `length_column_name`; None for a stream."""
    if not isinstance(dataset, Dataset):
        logger.warning("group_by_length has no effect on a stream: its rows come as they do.")
        return None
    if run.args.length_column_name in dataset.column_names:
        return np.asarray(dataset[run.args.length_column_name])
    if run.encoder is not None:
        raise ValueError(
            "train_sampling_strategy='group_by_length' needs the length of each row, which is not known of rows with "
            f"images. Add a column {run.args.length_column_name!r} with the lengths, or use 'random'."
        )
    texts = [np.fromiter(map(len, dataset[name]), np.int64) for name in run.task.columns.texts]
    return np.maximum.reduce(texts)


# ----------------------------------------------------------------------------------------------------
# Dataloaders in the form that scripts expect.


class Batches:
    """Iterates over micro-batches as dicts of NumPy arrays: `input_ids`, `attention_mask`, and those of the task.

    steps: the underlying loader of optimizer steps.
    dataset, batch_size: of that loader.
    """

    def __init__(self, steps: ExampleLoader, task: Task):
        self.steps, self._task = steps, task
        self.dataset, self.batch_size = steps.dataset, steps.batch_size

    def set_epoch(self, epoch: int) -> None:
        self.steps.set_epoch(epoch)

    def __len__(self) -> int:
        """Micro-batches in an epoch; TypeError for a stream."""
        rows = len(self.dataset)
        return rows // self.batch_size if self.steps.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step in self.steps.laid_out(layout="padded", divided=False):
            yield from inputs_of(step.arrays, self._task)


def steps_of(batches: Any, method: str) -> ExampleLoader:
    """The loader of the `Batches` that a dataloader's method returned.

    Raises:
        TypeError: the method is a script's own and returned something else.
    """
    if not isinstance(batches, Batches):
        raise TypeError(
            f"{method} returned a {type(batches).__module__}.{type(batches).__qualname__}: wanted what the trainer's "
            "own gives. For other rows or another order, return self.batches(dataset, training=True)."
        )
    return batches.steps
