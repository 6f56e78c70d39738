"""The datasets of a run: prepared, loaded in batches, and prefetched while the device computes."""

from __future__ import annotations

import abc
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from queue import Empty, Queue
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

import jax
import numpy as np
from datasets import Dataset, IterableDataset

from trl_jax.config.base import BaseConfig
from trl_jax.core.outputs import Images, VirtualTokens
from trl_jax.core.text import brief
from trl_jax.core.torch_random import default_generator
from trl_jax.data.batch import IGNORED, Batch, Columns, Example, of_examples
from trl_jax.data.checks import argument, check_labels, check_token_ids
from trl_jax.data.layout_plan import LayoutPlan
from trl_jax.data.loader import ExampleLoader, IndexedExample, StepBatch, StepLayout, Weighting
from trl_jax.hub.generate import complete
from trl_jax.hub.torch_state import draw_base_seed, is_data_loader, with_seed
from trl_jax.hub.vision.processor import native_of
from trl_jax.mesh.jax_internals import devices_have_started
from trl_jax.mesh.mesh import SEQUENCE, ShardingPlan, distributed
from trl_jax.rollout.steps import BASE_SEED_WORDS
from trl_jax.tasks.task import Task
from trl_jax.training import layout
from trl_jax.training.logging import GenerationProgress, ProgressLine, tell
from trl_jax.training.state import Setup, Tokenization

logger = logging.getLogger(__name__)
_FEW_ROWS = 1_000  # tokenized faster than worker processes start
_AHEAD = 2  # prefetched batches
_POLL, _LONGEST_WAIT = 0.5, 5.0  # seconds: between calls of `waiting`, and until a thread is abandoned


def prepare(
    task: Task,
    args: BaseConfig,
    tokenization: Tokenization,
    dataset: Any,
    name: str,
    *,
    printed: set[str],
    bounded: bool = True,
) -> Dataset | IterableDataset:
    """Prepare rows for the loader.

    Args:
        printed: topics of the lines that the run has already printed.
        bounded: whether `args.max_length` applies.
    """
    tokenizer = tokenization.tokenizer
    if tokenization.encoder is not None:
        return task.prepare_images(dataset, tokenizer, name=name)  # tokenized in the loader
    if tokenization.reader is not None and not task.online:
        tokenizer = tokenization.reader(tokenizer)
    prepared = task.prepare(
        dataset,
        tokenizer,
        max_length=args.max_length if bounded else None,
        num_proc=_forked_processes(args.dataset_num_proc, dataset, name, printed),
        name=name,
    )
    columns = task.columns
    prepared = check_token_ids(prepared, columns.texts, tokenization.vocab_size, name, tokenization.max_positions)
    return check_labels(prepared, columns, tokenization.vocab_size, name) if columns.labels else prepared


def _forked_processes(num_proc: int | None, dataset: Any, name: str, printed: set[str]) -> int | None:
    """`dataset_num_proc`, or None if JAX has started: a fork can deadlock once JAX has threads, so rows are then
    tokenized in this process, with the same result."""
    if not num_proc or not devices_have_started():
        return num_proc
    if isinstance(dataset, Dataset) and len(dataset) > _FEW_ROWS and "num_proc" not in printed:
        printed.add("num_proc")
        logger.warning(
            "dataset_num_proc=%d: %s is tokenized in this process only, because JAX is already running and forking a "
            "multithreaded process can deadlock. The first trainer of a process tokenizes before JAX starts if it is "
            "given the model's name instead of a loaded model.",
            num_proc,
            argument(name),
        )
    return None


def order_of(args: BaseConfig, rows: Dataset | IterableDataset, step_examples: int) -> dict[str, Any]:
    """The arguments that determine the order of a table's rows within an epoch; empty for a stream.

    Args:
        step_examples: examples in an optimizer step.
    """
    if not isinstance(rows, Dataset):
        return {}
    order = {"train_sampling_strategy": args.train_sampling_strategy}
    if args.train_sampling_strategy != "sequential":
        order["data_seed"] = _order_seed(args)
    if args.train_sampling_strategy == "group_by_length":
        order["examples a step"] = step_examples
        order["length_column_name"] = args.length_column_name if args.length_column_name in rows.column_names else None
    return order


def _order_seed(args: BaseConfig) -> int:
    return args.seed if args.data_seed is None else args.data_seed


def training_loader(setup: Setup, dataset: Dataset | IterableDataset) -> ExampleLoader:
    """The steps of an epoch over a prepared training set."""
    args, lengths = setup.args, None
    if args.train_sampling_strategy == "group_by_length":
        lengths = _lengths(args, setup.task.columns.texts, dataset)
    again = isinstance(dataset, Dataset) and setup.length.num_epochs > 1
    return ExampleLoader(
        dataset,
        **_examples(setup, dataset, "train", again=again, by_batch=setup.steps_by_batch),
        step_layout=training_layout(setup, _plan_of_lengths(setup, dataset, lengths)),
        fill_last=setup.progress.fill_last,
        shuffle=args.train_sampling_strategy != "sequential",
        seed=_order_seed(args),
        lengths=lengths,
        drop_last=args.dataloader_drop_last and isinstance(dataset, Dataset),  # as in TRL, not rows of streams
    )


def evaluation_loader(
    setup: Setup, dataset: Dataset | IterableDataset, *, virtual: VirtualTokens | None = None
) -> ExampleLoader:
    """The batches of a prepared evaluation set, whose rows are never dropped, as in TRL.

    Args:
        virtual: the virtual tokens that precede each text; None uses those of the run's model.
    """
    again = isinstance(dataset, Dataset)
    return ExampleLoader(
        dataset,
        **_examples(setup, dataset, "eval", again=again, by_batch=bool(setup.batch_methods), virtual=virtual),
        step_layout=evaluation_layout(setup),
        fill_last=False,
        shuffle=False,
        seed=_order_seed(setup.args),
        lengths=None,
        drop_last=False,
    )


def _plan_of_lengths(setup: Setup, dataset: Dataset | IterableDataset, lengths: np.ndarray | None) -> LayoutPlan | None:
    """The layout of steps by the lengths of the training set's texts; None if these are not surveyed."""
    if setup.steps_by_batch or setup.encoder is not None:
        return None
    return layout.plan(
        setup.args,
        setup.model.backend,
        dataset,
        setup.task.columns.texts,
        parameters=setup.model.num_parameters(exclude_embeddings=True),
        batch_size=setup.train_batch_size,
        steps=setup.length.max_steps,
        shards=setup.shards,
        striped=_striped(setup.sharding_plan),
        whole_micro_batches=_needs_whole_micro_batches(setup.task, setup.router_aux_loss_coef),
        documents=setup.task.columns.documents,
        compares=setup.compares,
        lengths=lengths,
        tell=partial(tell, setup.progress.printed, "layout"),
    )


def _examples(
    setup: Setup, dataset: Any, name: str, *, again: bool, by_batch: bool, virtual: VirtualTokens | None = None
) -> dict[str, Any]:
    """How an `ExampleLoader` makes examples of rows.

    Args:
        name: "train" or "eval".
        again: whether rows are used more than once.
        by_batch: whether a script's methods get the batches.
    """
    if setup.encoder is None:
        example = example_maker(setup.task, setup.virtual if virtual is None else virtual)
        return {"columns": setup.task.columns, "example": example}
    return {
        "columns": image_columns(dataset),
        "example": _image_example_maker(setup, cached=again and not by_batch),
        "where": argument(name),
        "image_rows": setup.task.image_rows,
    }


class RowOrder:
    """The order of a training set's rows in each epoch, as determined by the arguments: a sampler for scripts."""

    def __init__(self, loader: ExampleLoader):
        self._loader, self._epoch = loader, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._loader.dataset)

    def __iter__(self) -> Iterator[int]:
        return iter(self._loader.order(self._epoch).tolist())


class SampledOrder:
    """The order of a user-defined sampler, which is iterated once per epoch, as in TRL. As in Accelerate, torch's
    RandomSampler is seeded by the epoch, and `set_epoch` is called if the sampler has it. A resumed run also draws the
    orders of the epochs before, so that a sampler with its own generator continues where it was.
    """

    def __init__(self, sampler: Any, loader: ExampleLoader, method: str, generator: Any = None, prepared: bool = True):
        """
        Args:
            method: the method that returned the sampler, for errors.
            generator: of the DataLoader.
            prepared: whether Accelerate prepares the DataLoader; if not, a RandomSampler keeps its generator.
        """
        self._sampler, self._loader, self._method = sampler, loader, method
        self._generator, self._prepared = generator, prepared
        self._known: tuple[int, np.ndarray] | None = None
        self._lock = Lock()  # one thread makes batches, and others compile ahead

    def __call__(self, epoch: int) -> np.ndarray:
        with self._lock:
            last = -1 if self._known is None else self._known[0]
            for missing in range(last + 1, epoch) if last < epoch else ():
                self._drawn(missing)
            if last != epoch:
                self._known = epoch, self._drawn(epoch)
            return self._known[1]

    def _drawn(self, epoch: int) -> np.ndarray:
        rows = len(self._loader.dataset)
        sampler = with_seed(self._sampler, self._loader.seed + epoch, replaces=self._prepared)
        if self._generator is not None:
            draw_base_seed(self._generator)
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        indices = list(islice(sampler, self._count(sampler)))
        order = np.asarray(indices)
        if order.dtype.kind not in "iu" or order.ndim != 1 or order.size and not 0 <= order.min() <= order.max() < rows:
            raise TypeError(
                f"{self._method} gave {brief(indices)}; expected indices of the {rows} rows of train_dataset."
            )
        if len(order) != rows:
            raise ValueError(
                f"{self._method} gave {len(order)} indices; expected one for each of the {rows} rows of train_dataset. "
                "Repeat or leave out rows with train_dataset.select(indices)."
            )
        return order

    def _count(self, sampler: Any) -> int | None:
        """The number of indices to take, or None to take all, after which a RandomSampler draws again from its
        generator. A DataLoader that Accelerate has not prepared stops before that if its last batch is full."""
        if self._prepared or not isinstance(sampler, Sized):
            return None
        full = self._loader.drop_last or len(sampler) % self._loader.batch_size == 0
        return len(sampler) if full else None


def _image_example_maker(setup: Setup, *, cached: bool) -> Callable[[dict[str, Any]], Example]:
    """Row -> example, with image features if these may be `cached`: a script's methods get the patches."""
    task, encoder, args, store = setup.task, setup.encoder, setup.args, setup.features
    if store is None or not cached:
        return lambda row: task.image_example(row, encoder, args.max_length)
    store.follow(setup.model, setup.reference)

    def example(row: dict[str, Any]) -> Example:
        tokenized = task.image_example(row, encoder, args.max_length)
        return tokenized._replace(images=store.filled(tokenized.images))

    return example


def image_columns(dataset: Dataset | IterableDataset) -> Columns:
    """The columns of a dataset with images: all of them."""
    return Columns((), raw=tuple(dataset.column_names or ()))


def example_maker(task: Task, virtual: VirtualTokens) -> Callable[[dict[str, Any]], Example]:
    """Row -> example, with these virtual tokens prepended to each text."""
    if not virtual.count:
        return task.example
    return lambda row: task.example(row).with_virtual_tokens(virtual, predicted=task.predicts_first)


def placed_pass(arrays: Batch, plan: ShardingPlan | None) -> Batch:
    """A step's only pass, placed on the devices for `ShardedStep.scores`: arrays `[shards, ...]`."""
    arrays = only_pass(arrays, plan)
    return arrays if plan is None else distributed(arrays, plan.rows)


def only_pass(arrays: Batch, plan: ShardingPlan | None) -> Batch:
    """A step's only pass, on the host."""
    return arrays if plan is None or plan.shards == 1 else first_pass(arrays)


def first_pass(arrays: Any) -> Any:
    """The first pass of a step, or the first shard of a pass."""
    return jax.tree.map(lambda leaf: leaf[0], arrays)


def reason_of_layout(setup: Setup) -> str:
    """Why the run's layout, without a survey of lengths, is not the requested one; "" if it is."""
    options = {"striped": _striped(setup.sharding_plan), "branches": setup.task.online}
    return layout.exact_layout(setup.args, setup.model.backend, **options)[1]


def training_layout(setup: Setup, plan: LayoutPlan | None = None) -> StepLayout:
    """The layout of the run's steps, for examples from any source.

    Args:
        plan: the layout, if lengths were surveyed; None uses the run's layout with buckets for any lengths.
    """
    weighting = _weighting(setup)
    if weighting != "examples" and not setup.online and averages_micro_batches(setup.model):
        weighting = "micro_batches"
    accumulation = setup.args.gradient_accumulation_steps
    sizes = {"batch_size": setup.micro_batch_examples, "accumulation": accumulation}
    return _layout(setup, plan, by_batch=setup.steps_by_batch, weighting=weighting, trains=True, **sizes)


def evaluation_layout(setup: Setup) -> StepLayout:
    """The layout of an evaluation batch."""
    sizes = {"batch_size": setup.args.per_device_eval_batch_size * setup.shards, "accumulation": 1}
    by_batch = bool(setup.batch_methods)
    return _layout(setup, None, by_batch=by_batch, weighting=_weighting(setup), trains=False, **sizes)


def _layout(setup: Setup, plan: LayoutPlan | None, *, by_batch: bool, **options: Any) -> StepLayout:
    """A layout with these further fields; with `by_batch`, of whole batches of padded rows."""
    if by_batch:
        plan = LayoutPlan("padded")  # scripts get rows
    elif plan is None:
        how = {"striped": _striped(setup.sharding_plan), "branches": setup.online, "compares": setup.compares}
        plan = layout.unplanned(setup.args, setup.model.backend, **how)
    return StepLayout(
        pad_token_id=setup.processing_class.pad_token_id,
        pad_to_multiple_of=setup.pad_to_multiple_of,
        layout=plan.layout,
        buckets=plan.buckets,
        views=plan.views,
        whole_micro_batches=_needs_whole_micro_batches(setup.task, setup.router_aux_loss_coef),
        shards=setup.shards,
        divided=not by_batch,
        padding_free=setup.task.padding_free,
        **options,
    )


def _weighting(setup: Setup) -> Weighting:
    """How a loss weights its examples."""
    if setup.task.head == "score" or not setup.task.per_token:
        return "examples"
    return "tokens" if setup.args.average_tokens_across_devices else "shards"


def averages_micro_batches(model: Any) -> bool:
    """Whether transformers averages this model's mean losses over micro-batches, instead of counting targets."""
    if model.accepts_loss_kwargs is not None:
        return not model.accepts_loss_kwargs
    native = native_of(model)
    return native is not None and native.family.mean_of_micro_batches


def _needs_whole_micro_batches(task: Task, router_aux_loss_coef: float) -> bool:
    """Whether the loss has to see all examples of a micro-batch together."""
    return task.head == "lm" and (task.whole_micro_batches or router_aux_loss_coef != 0)


def _striped(plan: ShardingPlan | None) -> bool:
    """Whether the mesh splits texts over devices."""
    return plan is not None and plan.size(SEQUENCE) > 1


def _lengths(args: BaseConfig, texts: tuple[str, ...], dataset: Dataset | IterableDataset) -> np.ndarray | None:
    """The length of each row `[rows]`: of its longest text, or from `length_column_name`; None for a stream."""
    if not isinstance(dataset, Dataset):
        logger.warning("group_by_length has no effect on a stream: its rows come as they do.")
        return None
    if args.length_column_name in dataset.column_names:
        return np.asarray(dataset[args.length_column_name])
    if not set(texts) <= set(dataset.column_names):
        raise ValueError(
            "train_sampling_strategy='group_by_length' needs the length of each row, which is not known of rows with "
            f"images. Add a column {args.length_column_name!r} with the lengths, or use 'random'."
        )
    return np.maximum.reduce([np.fromiter(map(len, dataset[name]), np.int64) for name in texts])


# Dataloaders in the form that scripts expect.


class Batches:
    """Iterates over micro-batches as dicts of NumPy arrays: `input_ids`, `attention_mask`, and the task's other inputs.

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
        steps = self.steps.with_layout(layout="padded", divided=False)
        for step in replace(steps, example=lambda row: _without_features(steps.example(row))):
            yield from map(seen_by_scripts, inputs_of(step.arrays, self._task))


def _without_features(example: Example) -> Example:
    return example._replace(images=tuple(image._replace(features=()) for image in example.images))


def in_order_of(
    dataloader: Any,
    batches: Callable[[Dataset], Batches],
    args: BaseConfig,
    collator: Any,
    method: str,
    prepared: Callable[[Any], bool],
) -> Any:
    """The result of a user-defined get_train_dataloader. For a torch DataLoader over prepared rows: batches of its
    rows, in the order of its sampler.

    Args:
        batches: dataset -> its batches.
        collator: the trainer's.
        method: for errors.
        prepared: whether a DataLoader was prepared by `trainer.accelerator`.

    Raises:
        TypeError, ValueError: the DataLoader differs from the trainer's in more than rows and sampler.
    """
    if not is_data_loader(dataloader):
        return dataloader
    if not isinstance(dataloader.dataset, Dataset):
        raise TypeError(
            f"{method} returned a DataLoader over a {type(dataloader.dataset).__qualname__}; expected a "
            "datasets.Dataset, such as self.train_dataset."
        )
    # Without a collate function, a DataLoader takes torch's default.
    collate = None if collator is None and _is_default_collate(dataloader.collate_fn) else dataloader.collate_fn
    settings = (
        ("batch_size", dataloader.batch_size, "args.per_device_train_batch_size", args.per_device_train_batch_size),
        ("drop_last", dataloader.drop_last, "args.dataloader_drop_last", args.dataloader_drop_last),
        ("collate_fn", collate, "data_collator", collator),
    )
    for name, used, source, value in settings:
        if used is not value and used != value:
            raise ValueError(
                f"{method} returned a DataLoader with {name}={brief(used)}; expected self.{source}, {brief(value)}: "
                "the DataLoader's rows and sampler are used, and batches are made as by the trainer."
            )
    ordered = batches(dataloader.dataset)
    order = SampledOrder(dataloader.sampler, ordered.steps, method, dataloader.generator, prepared(dataloader))
    ordered.steps = ordered.steps.in_order(order)
    return ordered


def _is_default_collate(function: Any) -> bool:
    module = getattr(function, "__module__", "")
    return module == "torch.utils.data._utils.collate" and function.__name__ == "default_collate"


def steps_of(batches: Any, method: str) -> ExampleLoader:
    """The loader of the `Batches` that a dataloader's method returned.

    Raises:
        TypeError: the method is user-defined and returned something else.
    """
    if not isinstance(batches, Batches):
        raise TypeError(
            f"{method} returned a {type(batches).__module__}.{type(batches).__qualname__}; expected what the trainer's "
            "own gives. For other rows or another order, return self.batches(dataset, training=True)."
        )
    return batches.steps


class RowImages(NamedTuple):
    """The images of padded rows `[R, T]`.

    images: `Images` or `PrecomputedFeatures`, as one shard.
    positions: int32 `[R, T]`, or `[R, T, A]` where tokens have positions on A axes.
    """

    images: Any
    positions: Any


ROW_IMAGES = "row_images"  # an entry of `inputs_of` that is hidden from scripts


def seen_by_scripts(inputs: dict[str, Any]) -> dict[str, Any]:
    """The entries of `inputs_of` that user-defined methods get."""
    return {name: value for name, value in inputs.items() if name != ROW_IMAGES}


def inputs_of(arrays: Batch, task: Task, virtual: int = 0) -> list[dict[str, Any]]:
    """The inputs of each micro-batch of a step of padded rows, in the form of `task.inputs`. Padding examples, and the
    `virtual` tokens that each row begins with, are removed.

    If rows have images, `ROW_IMAGES` says where they belong, and `pixel_values` `[P, C]` are the patches of all of them
    (absent if their features are cached).
    """
    micro_batches = [jax.tree.map(lambda leaf, m=m: leaf[m], arrays) for m in range(len(arrays.weight))]
    texts = len(task.columns.texts)
    return [task.inputs(_real_rows(batch, texts, virtual)) for batch in micro_batches if batch.weight.any()]


def _real_rows(batch: Batch, texts: int, virtual: int) -> dict[str, np.ndarray]:
    """`input_ids`, `attention_mask` and, if there are targets, `labels` of the real rows; also the numbers per example
    and per text, without padding examples."""
    examples, labels = int(np.count_nonzero(batch.weight)), {}
    if batch.targets is None:
        tokens, lengths = (of_examples(array, texts, examples) for array in (batch.tokens, batch.lengths))
    else:
        real = batch.lengths > 0
        tokens, lengths, labels = batch.tokens[real], batch.lengths[real], {"labels": _labels(batch)[real]}
    rows = {"input_ids": tokens, "attention_mask": (np.arange(tokens.shape[1]) < lengths[:, None]).astype(np.int32)}
    rows = {name: values[:, virtual:] for name, values in (rows | labels).items()}
    if batch.images is not None:
        images = batch.images._replace(at=batch.images.at[real])
        rows |= {ROW_IMAGES: RowImages(images, batch.positions[real])}
        if isinstance(images, Images):
            rows |= {"pixel_values": images.patches[0]}
    numbers = {name: values[:examples] for name, values in batch.extras.example.items()}
    numbers |= {name: of_examples(values, texts, examples) for name, values in batch.extras.text.items()}
    return rows | numbers


def _labels(batch: Batch) -> np.ndarray:
    """Transformers' labels `[R, T]` of padded rows: targets and first labels at their own positions, -100 elsewhere."""
    labels, read = np.full(batch.tokens.size, IGNORED, np.int32), batch.targets >= 0
    labels[batch.reads[read] + 1] = batch.targets[read]
    labels = labels.reshape(batch.tokens.shape)
    labels[:, 0] = batch.first_labels
    return labels


# Prefetching: make and place the next batch while the device computes on the current one.


_END = object()  # follows the last batch in the queue


class _Failure(NamedTuple):
    """An error of the thread, in the queue in place of a batch."""

    error: BaseException


@dataclass
class AsNeeded:
    """Iterates over `batches` on demand, without a thread, so that each batch is made with the newest parameters.

    place: applied to each batch; None leaves batches unchanged.
    """

    batches: Any
    place: Callable[[Any], Any] | None = None

    def set_epoch(self, epoch: int, skip: int = 0, skipped_digest: int | None = None) -> None:
        self.batches.set_epoch(epoch, skip, skipped_digest)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield batch if self.place is None else self.place(batch)


@dataclass
class Prefetched(AsNeeded):
    """Iterates over `batches` in a background thread, in order, and places them there. Errors of the thread are raised
    in the consumer.

    waiting: called every half second while no batch arrives, as when a stream stalls; its errors end the wait.
    """

    waiting: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[Any]:
        queue, stop = Queue(_AHEAD), Event()
        thread = Thread(target=self._make, args=(queue, stop), name="trl_jax-batches", daemon=True)
        thread.start()
        try:
            while (item := self._next(queue)) is not _END:
                if isinstance(item, _Failure):
                    raise item.error
                yield item
        finally:
            _end(thread, queue, stop)

    def _next(self, queue: Queue) -> Any:
        while True:
            try:
                return queue.get(timeout=_POLL)
            except Empty:
                if self.waiting is not None:
                    self.waiting()

    def _make(self, queue: Queue, stop: Event) -> None:
        try:
            for batch in super().__iter__():
                queue.put(batch)
                if stop.is_set():
                    return
            queue.put(_END)
        except BaseException as error:
            queue.put(_Failure(error))


def _end(thread: Thread, queue: Queue, stop: Event) -> None:
    """Wait for the thread to end, because the next thread may read the same rows. A thread that is blocked by a stalled
    stream is abandoned, and ends with its next batch."""
    stop.set()
    until = time.monotonic() + _LONGEST_WAIT
    while thread.is_alive() and time.monotonic() < until:
        with contextlib.suppress(Empty):
            queue.get(timeout=0.02)


# Completions that are generated just before the step that trains on them.


@dataclass
class GeneratedSteps(abc.ABC):
    """The steps of a loader whose completions are generated when a step is requested, with the current parameters.

    Completions are sampled with the process's random stream. At the start of an epoch, it is advanced by as many words
    as torch's DataLoader draws there.
    """

    loader: ExampleLoader

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    @property
    def batch_size(self) -> int:
        return self.loader.batch_size

    @property
    def drop_last(self) -> bool:
        return self.loader.drop_last

    @property
    def seed(self) -> int:
        return self.loader.seed

    def in_order(self, order: Callable[[int], np.ndarray]) -> GeneratedSteps:
        """A copy with a user-defined order: epoch -> row indices."""
        return replace(self, loader=self.loader.in_order(order))

    def with_layout(self, **changes: Any) -> ExampleLoader:
        """The loader of the dataset's own rows, with these fields of the layout replaced."""
        return self.loader.with_layout(**changes)

    def set_epoch(self, epoch: int, skip: int = 0, skipped_digest: int | None = None) -> None:
        self.loader.set_epoch(epoch, skip, skipped_digest)
        if not skip:  # within an epoch, the restored stream has already been advanced
            default_generator().skip(BASE_SEED_WORDS)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[StepBatch]:
        for number, group in enumerate(self.loader.groups()):
            yield self._step(group, number)

    @abc.abstractmethod
    def _step(self, group: Sequence[Sequence[IndexedExample]], number: int) -> StepBatch:
        """The arrays of a step, with new completions.

        Args:
            group: the rows of each micro-batch.
            number: the step's number.
        """


class Completer:
    """Completes prompts with the process's random stream.

    Args:
        options: fields of a GenerationConfig, including `eos_token_id` and `pad_token_id`.
    """

    def __init__(self, setup: Setup, options: Mapping[str, Any]):
        self._setup, self._options, self._line = setup, options, ProgressLine(setup.events)

    def __call__(self, model: Any, prompts: Sequence[Sequence[int]], dtype: str) -> list[np.ndarray]:
        """One completion for each prompt, int32, including its EOS token, if any.

        Args:
            model: the PreTrainedModel that generates.
            dtype: the compute dtype.
        """
        args = self._setup.args
        how = {"head_dtype": "float32" if args.cast_lm_head_to_fp32 else None, "logps": False}
        how |= {"progress": GenerationProgress(self._line, len(prompts)), "tokenizer": self._setup.processing_class}
        with self._setup.on_device():
            out = complete(model, prompts, self._options, group=1, stream=default_generator(), dtype=dtype, **how)
        self._line("training")
        return [tokens[:length] for tokens, length in zip(out.tokens, out.lengths, strict=True)]
