"""The parts of a run (`Setup`), what a script may still change (`Editable`), the methods that it may override
(`Hooks`), and the progress of training (`Progress`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from datasets import Dataset, IterableDataset
from transformers.trainer_callback import TrainerState

from trl_jax.config.base import BaseConfig
from trl_jax.core.outputs import VirtualTokens
from trl_jax.data.chat import ProcessorTokenizer
from trl_jax.data.image_rows import Encoder
from trl_jax.data.loader import RunLength, run_length
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.mesh.mesh import ShardingPlan
from trl_jax.tasks.task import Task
from trl_jax.training.devices import on_device
from trl_jax.training.events import Events, Interrupts
from trl_jax.training.features import FeatureStore
from trl_jax.training.layout import longest_text
from trl_jax.training.optimizer_choice import LearningRate
from trl_jax.training.reference import ReferenceModel

# Methods around the loss: a step with one of them runs like a step with a user-defined loss.
STEP_METHODS = frozenset({"training_step", "_prepare_inputs"})
BATCH_METHODS = STEP_METHODS | {"compute_loss", "prediction_step"}  # methods of a script that get whole batches


class Tokenization(NamedTuple):
    """The tokenizer of a run, and the limits of its token ids and texts.

    vocab_size: token ids must be below it.
    max_positions: maximum tokens in a text; None without a limit.
    encoder: makes examples from rows with images; None for text-only rows.
    reader: tokenizes conversations as the processor of a vision-language model; None: the tokenizer does.
    """

    tokenizer: Any
    vocab_size: int
    max_positions: int | None
    encoder: Encoder | None = None
    reader: type[ProcessorTokenizer] | None = None


@dataclass
class Editable:
    """What a script may set on its trainer after construction: the trainer's attributes of the same names.

    The parts of a run read these values when they need them, so that a compiled step, an evaluator or a checkpointer
    never has an outdated copy. The trainer creates it, and `training.setup.build` fills it in: what is not yet known is
    None; in a finished `Setup`, only `eval_dataset` may be None.

    args, task: how to train, and what to learn.
    pad_to_multiple_of: from the arguments, or from the collator that was passed.
    tokenization: a script may set its tokenizer, as `processing_class`.
    """

    args: BaseConfig
    task: Task | None = None
    pad_to_multiple_of: int | str | None = None
    tokenization: Tokenization | None = None
    model: PreTrainedModel | None = None
    train_dataset: Dataset | IterableDataset | None = None
    eval_dataset: Any = None

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        return None if self.tokenization is None else self.tokenization.tokenizer

    @processing_class.setter
    def processing_class(self, tokenizer: Any) -> None:
        self.tokenization = self.tokenization._replace(tokenizer=tokenizer)


@dataclass
class Progress:
    """What train() changes, besides the model's arrays, a reference that follows the policy, and `events.state`.

    It lives as long as the trainer: a second train() continues from it. The position of a single train() within its
    epochs is a `checkpoint.LoopProgress`.

    optimizer_state: after the last step; None before the first.
    tokens_seen: real tokens (no padding) of all steps so far.
    input_tokens_before: `state.num_input_tokens_seen` when train() started.
    found_batch_size: by auto_find_batch_size.
    fill_last: whether the last micro-batch of an epoch is padded with examples, as in the run that is resumed; None:
        only on several devices.
    loaded_dataset: the rows of a user-defined get_train_dataloader in the last train(); None without one.
    in_train: whether train() is running.
    printed: topics of the lines that the run has already printed (`training.logging.tell`).
    interrupts: the signals of the last train().
    schedule: the learning rates of the last train(); None before the first.
    """

    optimizer_state: Any = None
    tokens_seen: int = 0
    input_tokens_before: int = 0
    found_batch_size: int | None = None
    fill_last: bool | None = None
    loaded_dataset: Dataset | IterableDataset | None = None
    in_train: bool = False
    printed: set[str] = field(default_factory=set)
    interrupts: Interrupts = field(default_factory=Interrupts)
    schedule: LearningRate | None = None


class Hooks(NamedTuple):
    """Methods of the trainer, looked up when they are called, because a script may replace them on the trainer at any
    time. Only `BaseTrainer._hooks` creates them.

    batch_methods, loss_compares, completions_loss, overridden: as in `Setup`.
    loss: returns the user-defined `loss`; None if there is none, and the step calls `Forward.loss` directly.
    loss_functions: the user-defined functions that compute the loss, from `overrides.loss_functions`.
    prepare_dataset: `(dataset, name) -> prepared dataset`, for the datasets of the constructor.
    save_checkpoint: takes a `checkpoint.LoopProgress`.
    script_values: the numbers and strings that a script has set on its trainer, by name.
    set_by_script: the names of everything that is set on the trainer instance, including methods.
    refresh_task: updates the run's task from the arguments and from what was set on the trainer.
    user_step: calls the user-defined `training_step` and `_prepare_inputs` (`user_loss.UserStep`); None without any.
    """

    batch_methods: frozenset[str]
    compute_loss: Callable
    create_optimizer: Callable[[], Any]
    evaluate: Callable[[], dict[str, float]]
    get_train_dataloader: Callable[[], Any]
    log: Callable[..., None]
    loss: Callable[[], Callable | None]
    loss_functions: Sequence[Callable]
    overridden: frozenset[str]
    prediction_step: Callable
    prepare_dataset: Callable[[Any, str], Any]
    save_checkpoint: Callable[[Any], None]
    save_model: Callable[..., None]
    script_values: Callable[[], tuple[tuple[str, Any], ...]]
    set_by_script: Callable[[], Collection[str]]
    refresh_task: Callable[[], None]
    user_step: Any = None
    loss_compares: bool = False
    completions_loss: Any = None


def _from_editable(name: str) -> property:
    return property(lambda self: getattr(self.editable, name), doc=f"`editable.{name}`.")


@dataclass(frozen=True, eq=False)
class Setup:
    """A complete run, created by `training.setup.build`. Its fields are never reassigned.

    editable: what a script may still set on its trainer.
    progress: what train() changes.
    overridden: names that a user's subclass of the trainer defines.
    batch_methods: the methods and functions of a script that get whole batches of padded rows: BATCH_METHODS,
        `compute_loss_func`, and `_compute_loss` of DPO and KTO. Not empty: steps or evaluations go batch by batch, as
        `user_loss.py` describes.
    batch_size: `per_device_train_batch_size` at construction, which transformers keeps; 0 reads the arguments instead.
    events: callbacks with their state and control.
    sharding_plan: how arrays are divided over several devices; None on a single device.
    reference: the reference model; None if the task has none, or if its log-probabilities were precomputed.
    router_aux_loss_coef: weight of the load-balancing loss of a mixture of experts; 0.0 disables it.
    features: cached image features of a frozen vision tower; None for text-only rows or on several devices.
    loss_compares: whether a user-defined loss gets the reference's log-probabilities, as in DPO and KTO.
    completions_loss: the user-defined loss that replaces the task's in a compiled step of online training
        (`user_completions_loss.UserCompletionsLoss`); None without one.
    """

    editable: Editable
    progress: Progress
    overridden: frozenset[str]
    batch_methods: frozenset[str]
    batch_size: int
    events: Events
    sharding_plan: ShardingPlan | None
    reference: ReferenceModel | None
    router_aux_loss_coef: float
    features: FeatureStore | None
    loss_compares: bool = False
    completions_loss: Any = None

    args, task, model = _from_editable("args"), _from_editable("task"), _from_editable("model")
    processing_class, pad_to_multiple_of = _from_editable("processing_class"), _from_editable("pad_to_multiple_of")
    train_dataset, eval_dataset = _from_editable("train_dataset"), _from_editable("eval_dataset")

    @property
    def vocab_size(self) -> int:
        """All token ids are below it."""
        return self.editable.tokenization.vocab_size

    @property
    def encoder(self) -> Encoder | None:
        """Makes examples from rows with images; None for text-only rows."""
        return self.editable.tokenization.encoder

    @property
    def reader(self) -> type[ProcessorTokenizer] | None:
        """As in `Tokenization`."""
        return self.editable.tokenization.reader

    @property
    def chat_tokenizer(self) -> Any:
        """Tokenizes conversations without images."""
        return self.processing_class if self.reader is None else self.reader(self.processing_class)

    @property
    def state(self) -> TrainerState:
        return self.events.state

    @property
    def moving_reference(self) -> dict[str, Any]:
        """The arrays of a reference that follows the policy; checkpoints contain them."""
        return {} if self.reference is None or self.reference.sync is None else self.reference.arrays

    @property
    def online(self) -> bool:
        """Whether steps are made of rollouts, instead of the rows of a dataset."""
        return self.task.online

    @property
    def frozen(self) -> dict[str, Any]:
        """All arrays that the step gets but does not train: the model's frozen ones, and the reference's."""
        return self.model.frozen if self.reference is None else self.model.frozen | self.reference.arrays

    @property
    def arrays(self) -> dict[str, Any]:
        """All arrays that the step computes with."""
        return self.frozen | self.model.params

    @property
    def steps_by_batch(self) -> bool:
        """Whether a step runs one micro-batch at a time, because a script's methods get them."""
        return bool(self.batch_methods - {"prediction_step"})

    @property
    def objective(self) -> Any:
        """The object with the compiled step's `loss` and `metrics`: the task, or a user-defined loss."""
        return self.task if self.completions_loss is None else self.completions_loss

    @property
    def computes_logits(self) -> bool:
        """Whether a pass over completions also computes their logits, for a user-defined loss."""
        if self.completions_loss is None or self.task.compares_distributions:
            return False
        return self.completions_loss.needs_logits

    @property
    def virtual(self) -> VirtualTokens:
        """The virtual tokens that precede each text."""
        return self.model.backend.virtual

    @property
    def max_tokens(self) -> int | None:
        """Maximum tokens in a text of the training set, including virtual tokens; None without a limit."""
        longest = longest_text(self.args)
        return None if longest is None else longest + self.virtual.count

    @property
    def compares(self) -> bool:
        """Whether each pass is also computed with a reference that has no virtual tokens."""
        compares = self.reference is not None and self.task.head == "lm" and bool(self.task.compared)
        return compares and not self.reference.backend.virtual.count

    @property
    def train_batch_size(self) -> int:
        """Examples in a micro-batch on each device: from the arguments, or found by auto_find_batch_size."""
        return self.progress.found_batch_size or self.batch_size or self.args.per_device_train_batch_size

    @property
    def shards(self) -> int:
        """The number of devices, or groups of devices, that examples are divided among."""
        return 1 if self.sharding_plan is None else self.sharding_plan.shards

    @property
    def micro_batch_examples(self) -> int:
        """Examples in a training micro-batch, over all devices."""
        return self.train_batch_size * self.shards

    @property
    def step_examples(self) -> int:
        """Examples in an optimizer step."""
        return self.micro_batch_examples * self.args.gradient_accumulation_steps

    @property
    def train_rows(self) -> Dataset | IterableDataset:
        """The rows of an epoch: `train_dataset`, or those of a user-defined get_train_dataloader."""
        loaded = self.progress.loaded_dataset
        return self.train_dataset if loaded is None else loaded

    @property
    def length(self) -> RunLength:
        """The length of the run, from its arguments and its training set or user-defined dataloader."""
        args, rows = self.args, self.train_rows
        if self.task.online:
            micro_batches = self.task.cycle.micro_batches(len(rows)) if isinstance(rows, Dataset) else None
            lengths = {"epochs": args.num_train_epochs, "max_steps": args.max_steps, "drop_last": False}
            if self.task.cycle.wraps and args.max_steps <= 0 and isinstance(rows, Dataset):
                lengths["max_steps"] = self.task.cycle.steps_of_passes(len(rows), args.num_train_epochs)
            return run_length(micro_batches, batch_size=1, accumulation=args.gradient_accumulation_steps, **lengths)
        return run_length(
            len(rows) if isinstance(rows, Dataset) else None,
            batch_size=self.micro_batch_examples,
            accumulation=args.gradient_accumulation_steps,
            drop_last=args.dataloader_drop_last,
            epochs=args.num_train_epochs,
            max_steps=args.max_steps,
        )

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        """A context that computes on the run's device; see `devices.on_device`."""
        return on_device(self.args)
