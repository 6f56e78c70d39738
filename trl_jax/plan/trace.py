"""Build the trainer of a planned run, with shapes instead of weights, and trace its programs."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from datasets import Dataset, IterableDataset
from jax.sharding import SingleDeviceSharding
from transformers.trainer_utils import SaveStrategy

from trl_jax.config.base import BaseConfig, Device
from trl_jax.data.batch import Batch, Columns
from trl_jax.data.loader import CHUNK_BATCHES, StepBatch
from trl_jax.hub.backend import Backend
from trl_jax.hub.checkpoint import Source
from trl_jax.hub.peft_backend import AdaptedBackend
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.mesh.mesh import make_mesh, placed
from trl_jax.plan import generation
from trl_jax.plan.chips import Topology
from trl_jax.plan.compile import devices
from trl_jax.plan.generation import start_first_epoch
from trl_jax.tasks.policy import RolloutTask
from trl_jax.tasks.task import Task
from trl_jax.trainer.base_trainer import BaseTrainer
from trl_jax.training import data
from trl_jax.training.evaluate import CompletionEvaluator
from trl_jax.training.forward import run_key
from trl_jax.training.state import Editable

MAX_SURVEYED = 2_048  # maximum number of steps whose lengths are surveyed
MAX_OF_PROMPTS = 64  # the same in online training, where every completion is assumed to have the maximum length


# The trainer


class PlannedConfig(BaseConfig):
    """A config with the planned devices; `planned_config` mixes it into the trainer's own config class."""

    platform: ClassVar[str]
    devices: ClassVar[list]
    counts_devices = True
    contacts_servers = False

    @property
    def device(self) -> Device:
        return Device(self.platform)

    def jax_devices(self) -> list:
        return self.devices


class PlaceholderTokenizer:
    """Replaces the tokenizer if the rows are token ids."""

    pad_token, pad_token_id, eos_token, eos_token_id = "<pad>", 0, "</s>", 0
    bos_token_id = None
    chat_template = None

    def __init__(self, tokens: int = 1):
        self._tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {self.pad_token: 0, self.eos_token: 0}

    def __call__(self, text: list[str], **options: Any) -> dict[str, list[list[int]]]:
        """Each text, which is a number, becomes `tokens` copies of that id, so that no two prompts share a prefix."""
        return {"input_ids": [[int(word) if word.isdigit() else 0] * self._tokens for word in text]}

    def batch_decode(self, ids: list, **options: Any) -> list[str]:
        return [""] * len(ids)


def task_of(trainer_cls: type[BaseTrainer], args: BaseConfig) -> Task:
    """The task of a trainer class with these arguments."""
    trainer = trainer_cls.__new__(trainer_cls)  # skip __init__: make_task only needs the arguments
    trainer._editable = Editable(args)
    return trainer.make_task()


def planned_config(args: BaseConfig, topology: Topology, output_dir: str) -> PlannedConfig:
    """Copy the config for a run on `topology` that does not save, report or push, and whose model is passed in."""
    sizes_resolved, args = args.counts_devices, copy.copy(args)
    target = {"platform": topology.platform, "devices": devices(topology)}
    args.__class__ = type("PlannedConfig", (PlannedConfig, type(args)), target)
    overrides = {"output_dir": output_dir, "report_to": [], "push_to_hub": False, "use_cpu": False}
    overrides |= {"save_strategy": SaveStrategy.NO, "load_best_model_at_end": False, "model_init_kwargs": None}
    if "teacher_model_init_kwargs" in vars(args):
        overrides |= {"teacher_model_init_kwargs": None}
    if "log_completions" in vars(args):
        overrides |= {"log_completions": False, "log_completions_hub_repo": None}
    for name, value in overrides.items():
        setattr(args, name, value)
    if sizes_resolved and "generation_batch_size" in vars(args):
        args.generation_batch_size = None  # it was computed for this machine's devices; steps_per_generation stays
    args.resolve_sizes()
    return args


def evaluates(args: BaseConfig) -> bool:
    """Whether the run evaluates during training."""
    return args.eval_strategy != "no" or args.eval_on_start


class Rows(NamedTuple):
    """The rows of a run and their tokenizer.

    If `train` is None, rows are synthetic: their texts have max_length tokens each and share no prefix.
    """

    train: Dataset | IterableDataset | None = None
    test: Any = None
    tokenizer: Any = None


def trainer_of(
    trainer_cls: type[BaseTrainer],
    model: PreTrainedModel,
    args: PlannedConfig,
    rows: Rows,
    teacher: PreTrainedModel | None = None,
) -> BaseTrainer:
    """Build the trainer of the run.

    Args:
        teacher: in distillation.

    Raises:
        ValueError: there is neither a dataset nor a maximum length, or the trainer rejects the arguments.
    """
    task, synthetic = task_of(trainer_cls, args), rows.train is None
    if synthetic:
        rows = _synthetic_prompts(task, args) if task.online else _synthetic_rows(task, args)
        args = copy.copy(args)
        args.eos_token = args.pad_token = args.chat_template_path = None
    trainer = trainer_cls(
        model=model,
        args=args,
        train_dataset=rows.train,
        eval_dataset=rows.test if evaluates(args) else None,
        processing_class=rows.tokenizer,
        **generation.extra_arguments(task, args, teacher),
    )
    if task.online:
        generation.use_longest_completions(trainer, synthetic=synthetic)
    return trainer


def _synthetic_prompts(task: RolloutTask, args: PlannedConfig) -> Rows:
    """Synthetic prompts, enough for a generation and an evaluation batch."""
    evaluated = args.per_device_eval_batch_size * args.data_parallel_size // task.num_generations_eval
    counts = (task.cycle.prompts, max(1, evaluated))
    return Rows(*(generation.longest_prompts(args, count) for count in counts), PlaceholderTokenizer())


def _synthetic_rows(task: Task, args: PlannedConfig) -> Rows:
    """Synthetic rows, enough for a step and an evaluation pass."""
    if args.max_length is None:
        raise ValueError(
            "max_length=None leaves the length of texts open: pass --max_length, or --dataset_name to use real lengths."
        )
    size, passes = args.per_device_train_batch_size, args.gradient_accumulation_steps
    counts = [count * len(args.devices) for count in (size * passes, args.per_device_eval_batch_size)]
    prompt_length = generation.prompt_length(args)
    if task.columns.prompts is not None:
        prompts = Dataset.from_dict({task.columns.prompts: list(map(str, range(counts[0])))})
        return Rows(prompts, None, PlaceholderTokenizer(prompt_length))
    train, test = (longest_rows(task.columns, args.max_length, count) for count in counts)
    if prompt_length < args.max_length:  # the trainer replaces completions by sampled ones, and makes the labels itself
        train, test = (rows.remove_columns(list(task.columns.labels)) for rows in (train, test))
        mask = [0] * prompt_length + [1] * (args.max_length - prompt_length)
        train, test = (rows.add_column("completion_mask", [mask] * len(rows)) for rows in (train, test))
    return Rows(train, test, PlaceholderTokenizer())


def longest_rows(columns: Columns, length: int, count: int) -> Dataset:
    """Make `count` synthetic rows with a task's columns and texts of `length` tokens.

    Each text repeats a different token id, so that texts share no prefix. All of its tokens are targets.
    """
    texts = [[number] * length for number, _ in enumerate(columns.texts, start=1)]
    row = dict(zip(columns.texts, texts, strict=True)) | dict(zip(columns.labels, texts, strict=False))
    row |= {name: 0.0 for name in columns.numbers if name not in columns.optional}
    return Dataset.from_dict({name: [value] * count for name, value in row.items()})


# Lengths of the steps


class Survey(NamedTuple):
    """The steps of a run.

    largest: the batch with the most tokens.
    lengths: length of (packed) rows -> number of steps with it.
    places, tokens: mean tokens per step, with padding and without.
    layout: of the rows.
    """

    largest: Batch
    lengths: dict[int, int]
    places: float
    tokens: float
    layout: str


def survey_steps(trainer: BaseTrainer, online_steps: generation.LongestSteps | None = None) -> Survey:
    """Survey the first steps of the first epoch.

    Args:
        online_steps: the steps of a trainer that samples completions just before each step.
    """
    lengths, places, tokens, largest = Counter(), [], [], None
    steps, layout = (
        _steps(trainer) if online_steps is None else (islice(online_steps, MAX_OF_PROMPTS), online_steps.layout)
    )
    for step in steps:
        lengths[step.arrays.tokens.shape[-1]] += 1
        places.append(step.num_places)
        tokens.append(step.num_tokens)
        if largest is None or step.num_places > largest.num_places:
            largest = step
    means = float(np.mean(places)), float(np.mean(tokens))
    return Survey(largest.arrays, dict(sorted(lengths.items())), *means, layout)


def _steps(trainer: BaseTrainer) -> tuple[Iterable[StepBatch], str]:
    """The first steps of the first epoch, and their layout."""
    run = trainer.parts.setup
    if run.online:
        steps = islice(start_first_epoch(trainer.parts.rollout_steps), MAX_OF_PROMPTS)
        return steps, data.training_layout(run).layout
    loader = trainer.loader(trainer.train_dataset, training=True)
    return islice(loader, MAX_SURVEYED), loader.step_layout.layout


def largest_evaluated(trainer: BaseTrainer) -> Batch:
    """The evaluation batch with the most tokens."""
    evaluator = trainer.parts.evaluator
    if isinstance(evaluator, CompletionEvaluator):
        rows = islice(evaluator.batches(trainer.eval_dataset), MAX_OF_PROMPTS)
        largest = max(map(evaluator.arrays, rows), key=lambda batch: batch.tokens.size)
        return data.only_pass(largest, trainer.sharding_plan)
    chunks = trainer.parts.evaluator.chunks(trainer.loader(trainer.eval_dataset, training=False))
    surveyed = islice(chunks, MAX_SURVEYED // CHUNK_BATCHES)
    return max((arrays for chunk in surveyed for arrays, _ in chunk.passes), key=lambda batch: batch.tokens.size)


# Shapes and programs


class StepArguments(NamedTuple):
    """The arguments of a step, as shapes with shardings."""

    params: dict[str, jax.ShapeDtypeStruct]
    state: Any
    batch: Batch | dict[str, jax.ShapeDtypeStruct]
    frozen: dict[str, jax.ShapeDtypeStruct]


class Pass(NamedTuple):
    """The (packed) rows that one device computes at once, `[rows, length]`.

    passes: per step.
    striped: number of devices that tokens are sharded over.
    """

    passes: int
    rows: int
    length: int
    striped: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a pass that one device computes."""
        return self.rows * self.length // self.striped


def step_arguments(trainer: BaseTrainer, tx: Any, batch: Batch) -> StepArguments:
    """The arguments of the compiled step, for a batch of the trainer's loader."""
    params, frozen, sharding_plan = trainer.model.params, trainer.parts.setup.frozen, trainer.sharding_plan
    if (user_loss := trainer.parts.train_step.user_loss) is not None:
        batch = _stack_inputs(user_loss.inputs(batch))
    state = jax.eval_shape(tx.init, params)
    if sharding_plan is None:
        return StepArguments(*_sharded(_single_device(trainer), (params, state, batch, frozen)))
    return StepArguments(
        sharding_plan.placed(params),
        sharding_plan.placed_state(state, params),
        _sharded(sharding_plan.batch, batch),
        sharding_plan.placed(frozen),
    )


def _stack_inputs(micro: list[dict[str, np.ndarray]]) -> dict[str, jax.ShapeDtypeStruct]:
    """The inputs of a user-defined loss for all micro-batches of a step, each padded to the shape of the largest."""
    largest = max(micro, key=lambda inputs: inputs["input_ids"].size)
    return {name: jax.ShapeDtypeStruct((len(micro), *array.shape), array.dtype) for name, array in largest.items()}


def evaluation_arguments(trainer: BaseTrainer, step: StepArguments, batch: Batch) -> StepArguments:
    """The arguments of an evaluation pass: those of the training step, but with this batch."""
    sharding = _single_device(trainer) if trainer.sharding_plan is None else trainer.sharding_plan.rows
    return step._replace(batch=_sharded(sharding, batch))


def _single_device(trainer: BaseTrainer) -> SingleDeviceSharding:
    return SingleDeviceSharding(trainer.args.jax_devices()[0])


def _sharded(sharding: Any, leaves: Any) -> Any:
    """Shapes and dtypes of these arrays, with this sharding."""
    return jax.tree.map(lambda leaf: placed(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), sharding), leaves)


def trace_step(trainer: BaseTrainer, tx: Any, arguments: StepArguments, *, remat: bool | str) -> jax.stages.Traced:
    """Trace the training step; it is lowered for the planned platform later."""
    key = jax.eval_shape(partial(run_key, trainer.args, trainer.parts.setup.model.backend))
    rate = jax.ShapeDtypeStruct((), np.float32)
    with on_device(trainer):
        step = trainer.parts.train_step.compiled(tx, remat=remat)
        return step.trace(arguments.params, arguments.state, arguments.batch, rate, key, arguments.frozen)


def trace_evaluation(trainer: BaseTrainer, arguments: StepArguments) -> jax.stages.Traced:
    """Trace an evaluation pass during training. The optimizer state is an unused argument, so that its memory
    counts."""

    evaluator = trainer.parts.evaluator

    def scores(arrays: dict, state: Any, batch: Batch) -> Any:
        del state
        if isinstance(evaluator, CompletionEvaluator):
            return evaluator.sums(arrays, batch)
        return evaluator.outputs(arrays, batch, dtype=trainer.args.compute_dtype)

    params = arguments.frozen | arguments.params
    with on_device(trainer):
        return jax.jit(scores, keep_unused=True).trace(params, arguments.state, arguments.batch)


def _source(backend: Backend) -> Source:
    return backend.base.source if isinstance(backend, AdaptedBackend) else backend.source


def arch_of(trainer: BaseTrainer) -> Any:
    """The `Arch` of the model or, if there is an adapter, of the base model."""
    return _source(trainer.model.backend).config.arch


@contextmanager
def on_device(trainer: BaseTrainer) -> Iterator[None]:
    """A context in which tracing and compiling target the run's device."""
    with trainer.parts.setup.on_device(), _platform(trainer):
        yield


def _platform(trainer: BaseTrainer) -> AbstractContextManager:
    """Tell kernels the platform of a single device, through an abstract mesh, if it is not this machine's."""
    if trainer.sharding_plan is not None or trainer.args.platform == jax.default_backend():
        return nullcontext()
    return jax.sharding.use_abstract_mesh(make_mesh({}, trainer.args.jax_devices()).abstract_mesh)


def mesh_of(trainer: BaseTrainer) -> dict[str, int]:
    """Axis -> size, for axes with more than one device."""
    axes = {} if trainer.sharding_plan is None else trainer.sharding_plan.mesh.shape
    return {axis: size for axis, size in axes.items() if size > 1}


def device_pass(trainer: BaseTrainer, arguments: StepArguments) -> Pass:
    """The rows that one device computes at once, from the sharding of the batch."""
    batch = arguments.batch
    tokens = batch["input_ids"] if isinstance(batch, dict) else batch.tokens
    passes, *rows, length = tokens.sharding.shard_shape(tokens.shape)
    return Pass(passes, math.prod(rows), length, mesh_of(trainer).get("sequence", 1))
