"""The state of a run."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from datasets import Dataset, IterableDataset
from transformers.trainer_callback import TrainerState

from trl_jax.config.base import BaseConfig
from trl_jax.core.outputs import VirtualTokens
from trl_jax.data.image_rows import Encoder
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.mesh.mesh import ShardingPlan
from trl_jax.rollout.rollout import RolloutSteps
from trl_jax.tasks.task import Task
from trl_jax.training.checkpoint import Progress
from trl_jax.training.events import Events, Interrupts
from trl_jax.training.mesh import run_device
from trl_jax.training.reference import ReferenceModel

# ---- The methods of a trainer that a script may have overridden, as the parts of a run call them


class TrainerHooks(NamedTuple):
    """Bound methods of the trainer, under their own names.

    settle_task: lets `run.task` be the task by the arguments, and what was set on the trainer, as they are now.
    script_values: the numbers and words that a script put on its trainer, by name.
    set_by_script: the names of all that was set on the trainer itself, methods included.
    """

    compute_loss: Callable
    create_optimizer: Callable[[], Any]
    evaluate: Callable[[], dict[str, float]]
    get_train_dataloader: Callable[[], Any]
    log: Callable[..., None]
    loss: Callable
    settle_task: Callable[[], None]
    prediction_step: Callable
    save_checkpoint: Callable[[Progress], None]
    save_model: Callable[..., None]
    script_values: Callable[[], tuple[tuple[str, Any], ...]]
    set_by_script: Callable[[], Collection[str]]


# ---- The state of a run, shared by all its parts: model, task, data, arguments, callbacks, and what steps change


OWN_LOSS = frozenset({"compute_loss", "prediction_step"})  # methods by which a script computes on a batch itself
# Of a run that is assembled, what the trainer's properties may still set, and nobody else.
SETTABLE = frozenset("model args task processing_class train_dataset eval_dataset pad_to_multiple_of".split())


@dataclass
class RunProgress:
    """The part of a run that train() changes, besides the model's arrays, a reference that follows, and `events.state`.

    optimizer_state: of the last step; a second train() goes on with it, as TRL's does.
    tokens_seen: real tokens of all steps so far.
    input_tokens_before: `state.num_input_tokens_seen` when train() began.
    found_batch_size: by auto_find_batch_size.
    fill_last: whether the last micro-batch of an epoch is filled up, as in the run that is resumed; None: on several
        devices.
    in_train: whether train() is under way.
    told: what the run has said of itself (`run.first_lines`).
    interrupts: the signals of the last train().
    """

    optimizer_state: Any = None
    tokens_seen: int = 0
    input_tokens_before: int = 0
    found_batch_size: int | None = None
    fill_last: bool | None = None
    in_train: bool = False
    told: set[str] = field(default_factory=set)
    interrupts: Interrupts = field(default_factory=Interrupts)


@dataclass
class RunState:
    """The set-up that the parts of a run share. The constructor of a trainer fills it in, and `end_setup` ends that:
    afterwards a script may set what the trainer shows of it (SETTABLE), and train() changes `progress`.

    args, task: how to train, and what to learn.
    overridden: names that a script's own subclass of the trainer defines.
    pad_to_multiple_of: of the arguments, or of the collator that was passed.
    batch_size: `per_device_train_batch_size` when the trainer was made, as transformers keeps it; 0: as it is.
    model, processing_class, train_dataset, eval_dataset: as the trainer shows them; set while it is constructed.
    vocab_size, max_positions: limits of token ids and of lengths of texts; max_positions=None is no limit.
    events: callbacks with their state and control.
    sharding_plan: where arrays lie on several devices; None on one.
    rollout: makes the rows of a run that writes them itself; None where they are a dataset's.
    reference: the model that the policy is compared with, in tasks that have one and do not know it beforehand.
    router_aux_loss_coef: weight of the load-balancing loss of a mixture of experts; 0.0 adds none.
    finish_rows: adds columns that the model computes to a prepared dataset of this name; None before the model is
        there, and where there are none.
    encoder: makes examples of rows with images; None where rows have none.
    progress: what train() changes.
    assembled: whether the set-up has ended.
    """

    args: BaseConfig
    task: Task
    overridden: frozenset[str] = frozenset()
    pad_to_multiple_of: int | str | None = None
    batch_size: int = 0
    model: PreTrainedModel | None = None
    processing_class: Any = None
    train_dataset: Dataset | IterableDataset | None = None
    eval_dataset: Any = None
    vocab_size: int = 0
    max_positions: int | None = None
    events: Events | None = None
    sharding_plan: ShardingPlan | None = None
    reference: ReferenceModel | None = None
    rollout: RolloutSteps | None = None
    router_aux_loss_coef: float = 0.0
    finish_rows: Callable[[Any, str], Any] | None = None
    encoder: Encoder | None = None
    progress: RunProgress = field(default_factory=RunProgress)
    assembled: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        if vars(self).get("assembled") and name not in SETTABLE:
            raise AttributeError(f"The run is assembled, and {name} of it is set no more.")
        super().__setattr__(name, value)

    def end_setup(self) -> None:
        """Let nothing but SETTABLE be set from here on."""
        self.assembled = True

    @property
    def state(self) -> TrainerState:
        return self.events.state

    @property
    def moving_reference(self) -> dict[str, Any]:
        """The arrays of a reference that follows the policy, which checkpoints have beside the policy's."""
        return {} if self.reference is None or self.reference.sync is None else self.reference.arrays

    @property
    def frozen(self) -> dict[str, Any]:
        """All arrays that reach the step without being trained: the model's frozen ones, and the reference's."""
        return self.model.frozen if self.reference is None else self.model.frozen | self.reference.arrays

    @property
    def arrays(self) -> dict[str, Any]:
        """All arrays that are computed with."""
        return self.frozen | self.model.params

    @property
    def own_loss(self) -> frozenset[str]:
        """The methods of OWN_LOSS that the script overrides."""
        return OWN_LOSS & self.overridden

    @property
    def virtual(self) -> VirtualTokens:
        """The virtual tokens before each text."""
        return self.model.backend.virtual

    @property
    def max_tokens(self) -> int | None:
        """No text of the training set has more tokens, with virtual ones; None where nobody knows."""
        return None if self.args.max_length is None else self.args.max_length + self.virtual.count

    @property
    def compares(self) -> bool:
        """Whether passes are computed with a reference, too, that knows no virtual tokens."""
        compares = self.reference is not None and self.task.head == "lm" and bool(self.task.compared)
        return compares and not self.reference.backend.virtual.count

    @property
    def train_batch_size(self) -> int:
        """Examples in a micro-batch, on each device: those of the arguments, or what auto_find_batch_size found."""
        return self.progress.found_batch_size or self.batch_size or self.args.per_device_train_batch_size

    @property
    def shards(self) -> int:
        """The number of devices, or groups of devices, over which examples are divided."""
        return 1 if self.sharding_plan is None else self.sharding_plan.shards

    @property
    def micro_batch_examples(self) -> int:
        """Examples of a micro-batch of training, on all devices together."""
        return self.train_batch_size * self.shards

    @property
    def step_examples(self) -> int:
        """Examples of a whole optimizer step."""
        return self.micro_batch_examples * self.args.gradient_accumulation_steps

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Compute on the run's device, float32 products as exact as torch's unless tf32 was asked for."""
        precision = "tensorfloat32" if self.args.tf32 and self.args.device.type == "cuda" else "float32"
        with jax.default_device(run_device(self.args)), jax.default_matmul_precision(precision):
            yield

    @contextlib.contextmanager
    def state_replaced(self, values: dict[str, Any]) -> Iterator[None]:
        """A context in which `state` has these values: arrays of a program that is traced."""
        real = self.events.state
        self.events.state = copy.copy(real)
        vars(self.events.state).update(values)
        try:
            yield
        finally:
            self.events.state = real
