"""A trainer on devices that this machine does not have: shapes in the place of weights and, if need be, of data."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from datasets import Dataset, IterableDataset
from transformers.trainer_utils import SaveStrategy

from trl_jax.core.chips import Topology
from trl_jax.data.example import Columns
from trl_jax.dryrun import made_completions
from trl_jax.dryrun.compiler import devices
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.run.arguments.base_config import BaseConfig
from trl_jax.run.arguments.jax_arguments import Device
from trl_jax.run.state import RunState
from trl_jax.tasks.rollout import RolloutTask
from trl_jax.tasks.task import Task
from trl_jax.trainer.base_trainer import BaseTrainer


@dataclass(frozen=True)
class PlannedDevice(Device):
    """The `args.device` of a planned run: of the planned platform, whatever this machine has."""

    platform: str = "cpu"

    @property
    def type(self) -> str:
        return "cuda" if self.platform == "gpu" else self.platform


class PlannedConfig(BaseConfig):
    """A config whose device and mesh are those planned for; `planned` mixes it into the trainer's own."""

    platform: ClassVar[str]
    devices: ClassVar[list]
    counts_devices = True

    @property
    def device(self) -> Device:
        return PlannedDevice(self.use_cpu, self.platform)

    def jax_devices(self) -> list:
        return self.devices


class PlaceholderTokenizer:
    """Stands in for a tokenizer where texts come as token ids."""

    pad_token, pad_token_id, eos_token, eos_token_id = "<pad>", 0, "</s>", 0
    bos_token_id = None
    chat_template = None

    def get_vocab(self) -> dict[str, int]:
        return {self.pad_token: 0, self.eos_token: 0}


def task_of(kind: type[BaseTrainer], args: BaseConfig) -> Task:
    """The task that a trainer of this class makes of these arguments."""
    trainer = kind.__new__(kind)  # no run is begun: a task is made of the arguments alone
    trainer._run = RunState(args, None)
    return trainer.make_task()


def planned(args: BaseConfig, topology: Topology, output_dir: str) -> PlannedConfig:
    """Copy the arguments for a run on `topology` that saves, reports and pushes nothing and is handed its model."""
    settled, args = args.counts_devices, copy.copy(args)
    target = {"platform": topology.platform, "devices": devices(topology)}
    args.__class__ = type("PlannedConfig", (PlannedConfig, type(args)), target)
    quiet = {"output_dir": output_dir, "report_to": [], "push_to_hub": False, "use_cpu": False}
    quiet |= {"save_strategy": SaveStrategy.NO, "load_best_model_at_end": False, "model_init_kwargs": None}
    if "teacher_model_init_kwargs" in vars(args):
        quiet |= {"teacher_model_init_kwargs": None}
    if "log_completions" in vars(args):
        quiet |= {"log_completions": False, "log_completions_hub_repo": None}
    for name, value in quiet.items():
        setattr(args, name, value)
    if settled and "generation_batch_size" in vars(args):
        args.generation_batch_size = None  # it was of this machine's devices; micro-batches stay as many
    args.settle_sizes()
    return args


def evaluates(args: BaseConfig) -> bool:
    """Whether the run evaluates on the way."""
    return args.eval_strategy != "no" or args.eval_on_start


class Rows(NamedTuple):
    """The rows of a run and their tokenizer. None as `train` stands for made-up rows, whose texts have max_length
    tokens each and share no prefix."""

    train: Dataset | IterableDataset | None = None
    test: Any = None
    tokenizer: Any = None


def trainer_of(
    kind: type[BaseTrainer],
    model: PreTrainedModel,
    args: PlannedConfig,
    rows: Rows,
    teacher: PreTrainedModel | None = None,
) -> BaseTrainer:
    """Build the trainer of the run.

    Args:
        teacher: of a student; None where the trainer takes none.

    Raises:
        ValueError: rows.train and what bounds texts are both None, the trainer refuses the arguments, or it computes
            the loss in a method of a script's.
    """
    columns, made_up = task_of(kind, args).columns, rows.train is None
    writes = columns.prompts is not None
    if made_up:
        rows = _prompts(task_of(kind, args), args) if writes else _longest_rows(columns, args)
        args = copy.copy(args)
        args.eos_token = args.pad_token = args.chat_template_path = None
    trainer = kind(
        model=model,
        args=args,
        train_dataset=rows.train,
        eval_dataset=rows.test if evaluates(args) else None,
        processing_class=rows.tokenizer,
        **(made_completions.further_arguments(args, teacher) if writes else {}),
    )
    if writes:
        made_completions.with_longest_completions(trainer, made_up=made_up)
    if own := sorted(trainer.parts.run.own_loss):
        raise ValueError(f"{kind.__name__} overrides {', '.join(own)}: a plan is of the task's own loss. Leave it out.")
    return trainer


def _prompts(task: RolloutTask, args: PlannedConfig) -> Rows:
    """As many prompts as a generation takes, and as an evaluation's batch does."""
    evaluated = args.per_device_eval_batch_size * args.data_parallel_size // task.num_generations_eval
    counts = (task.cycle.prompts, max(1, evaluated))
    return Rows(*(made_completions.longest_prompts(args, count) for count in counts), PlaceholderTokenizer())


def _longest_rows(columns: Columns, args: PlannedConfig) -> Rows:
    if args.max_length is None:
        raise ValueError("max_length=None bounds no text: pass --max_length, or --dataset_name for real lengths.")
    size, passes = args.per_device_train_batch_size, args.gradient_accumulation_steps
    counts = (size * passes, args.per_device_eval_batch_size)
    train, test = (longest(columns, args.max_length, count * len(args.devices)) for count in counts)
    return Rows(train, test, PlaceholderTokenizer())


def longest(columns: Columns, length: int, count: int) -> Dataset:
    """Make up `count` rows of a task's columns, with texts of `length` tokens.

    Each text is filled with an id of its own, so texts share no prefix, and each of its tokens is to be predicted.
    """
    texts = [[number] * length for number, _ in enumerate(columns.texts, start=1)]
    row = dict(zip(columns.texts, texts, strict=True)) | dict(zip(columns.labels, texts, strict=False))
    row |= {name: 0.0 for name in columns.numbers if name not in columns.optional}
    return Dataset.from_dict({name: [value] * count for name, value in row.items()})
