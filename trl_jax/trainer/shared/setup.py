"""The steps of a trainer's constructor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from trl_jax.hub.find import Checkpoint
from trl_jax.hub.peft.configs import AdapterConfig, positions_beside
from trl_jax.hub.peft.quantization import BitsAndBytesConfig
from trl_jax.hub.peft.trained_tokens import with_new_tokens
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.torch.objects import resize
from trl_jax.run import construction, layout_choice
from trl_jax.run.accelerator import Accelerator
from trl_jax.run.arguments.base_config import BaseConfig
from trl_jax.run.arguments.optimizer_choice import OptimizerChoice
from trl_jax.run.callbacks import begin_state, events_of
from trl_jax.run.devices import check_offloading
from trl_jax.run.hooks import TrainerHooks
from trl_jax.run.model import loading as model_loading
from trl_jax.run.output.hub_push import HubPublisher
from trl_jax.run.parts import assemble
from trl_jax.run.rollouts.parts import RolloutParts
from trl_jax.run.state import RunState
from trl_jax.run.step.rng import check_noise
from trl_jax.run.user_loss.bound_model import script_values
from trl_jax.tasks.task import Task
from trl_jax.trainer.shared.kept_arguments import kept_of, read_once
from trl_jax.trainer.shared.refusals import names_of_script
from trl_jax.trainer.shared.surface import Surface


class Setup(Surface):
    """The steps of `BaseTrainer.__init__`, in their order. `BaseTrainer` says what these attributes are:"""

    _name: ClassVar[str]
    _tag_names: ClassVar[list[str]]
    _paper: ClassVar[tuple[str, str] | None]
    config_class: ClassVar[type[BaseConfig]]
    _collator_class: ClassVar[type | None]
    _tokenizer_sides: ClassVar[Mapping[str, str] | None]
    _data_collator: Any
    data_collator: Any
    make_task: Callable[[], Task]
    _settle_task: Callable[[], None]

    def _config(self, args: BaseConfig | None, model: Any) -> BaseConfig:
        """The arguments that were passed, or those of a run that is called after its model."""
        if args is None:
            return self.config_class(f"{model_loading.short_name(model)}-{self._name}")
        if not isinstance(args, self.config_class):
            wanted = self.config_class.__name__
            raise TypeError(f"args is a {type(args).__module__}.{type(args).__qualname__}: wanted a {wanted}.")
        return args

    def _begin(self, args: BaseConfig, *, own_loss: bool) -> None:
        """Begin the run: its task is made, processes find each other, the Hub answers.

        Args:
            own_loss: the constructor was given a loss.
        """
        overridden = names_of_script(type(self)) | ({"compute_loss"} if own_loss else set())
        self._run = run = RunState(args, None, overridden=overridden)
        run.batch_size = args.per_device_train_batch_size
        self._kept = {name: kept.of(args) for name, kept in kept_of(type(self)).items()}
        self._read_once = read_once(self)
        run.task = self.make_task()
        run.pad_to_multiple_of = (args if self.data_collator is None else self.data_collator).pad_to_multiple_of
        self._publisher = HubPublisher(run, self._tag_names, self._paper)
        args.join_processes()  # before anything else
        if args.push_to_hub:  # first of all: a Hub that does not answer costs seconds, not a model's loading
            self.init_hf_repo()

    def _settle_data(
        self,
        checkpoint: Any,
        torch_model: Any,
        adapter: AdapterConfig | None,
        tokenizer: Any,
        train: Any,
        evaluation: Any,
    ) -> list[int]:
        """Settle the tokenizer and prepare rows, before weights are read: a bad row is named first, and num_proc forks
        before JAX has threads.

        Returns:
            The ids of tokens that the chat template brought.
        """
        run, args = self._run, self.args
        run.processing_class = construction.tokenizer_of(
            tokenizer, checkpoint, torch_model, args, self._tokenizer_sides
        )
        run.vocab_size, new_tokens = construction.settle_tokens(
            args, run.processing_class, checkpoint.vocab_size, can_resize=checkpoint.can_resize, head=run.task.head
        )
        run.max_positions = positions_beside(checkpoint.max_positions, adapter)
        run.train_dataset = self.prepare_dataset(train, "train")
        run.eval_dataset = self._prepared_for_evaluation(evaluation)
        return new_tokens

    def _load_policy(
        self,
        checkpoint: Checkpoint | PreTrainedModel,
        torch_model: Any,
        adapter: AdapterConfig | None,
        quantization: BitsAndBytesConfig | None,
        new_tokens: list[int],
    ) -> None:
        """Read the weights of the model that trains, and settle what the tokenizer and the arguments say of it.

        Args:
            new_tokens: those that the chat template brought, which an adapter trains, too.
        """
        run, args = self._run, self.args
        args.check()  # again: setters and plain assignment get past the check at construction
        construction.check_strategies(args, run.eval_dataset)
        if torch_model is not None and checkpoint.can_resize:
            resize(torch_model, run.vocab_size)
        if adapter is not None and new_tokens:
            adapter = with_new_tokens(adapter, new_tokens, run.task.head)
        run.model = model_loading.load_policy(checkpoint, args, adapter, quantization, run.vocab_size)
        if self.data_collator is None:
            self._data_collator = self._collator()
        construction.settle_model(run, [*self._tag_names, "trl_jax"], torch_model)

    def _collator(self) -> Any:
        """TRL's collator of these arguments, for scripts that call it; None where the task has none."""
        if self._collator_class is None:
            return None
        wanted = {field.name for field in dataclasses.fields(self._collator_class)}
        known = {name: value for name, value in vars(self.args).items() if name in wanted}
        if known["pad_to_multiple_of"] == "auto":
            known["pad_to_multiple_of"] = None
        return self._collator_class(pad_token_id=self.processing_class.pad_token_id, **known)

    def _assemble(
        self,
        callbacks: Any,
        choose: Callable[[], OptimizerChoice],
        torch_model: Any,
        reference: Callable[[RunState], None] | None,
        rollout: Callable[[RunState], RolloutParts] | None,
    ) -> None:
        """Divide the model over the devices and make the parts of the run; arguments as of `BaseTrainer` and
        `run.parts.assemble`."""
        run, args = self._run, self.args
        self.accelerator = Accelerator(args, self.end)
        construction.divide(run)
        if reference is not None:
            reference(run)
        construction.seed_script(args, apart=rollout is not None)
        run.events = events_of(run, callbacks)
        begin_state(run)
        self._balance_experts()
        own_rows = None if rollout is None else rollout(run)
        self.parts = assemble(run, self._hooks(), self._publisher, choose, torch_model, own_rows)
        run.end_setup()
        run.events.fire("on_init_end")
        check_noise(args, run.model.backend)
        layout_choice.check_layout(args, run.model.backend, compares=run.compares)
        check_offloading(args, run.model.backend)

    def _balance_experts(self) -> None:
        """Let the run add the load-balancing loss of a mixture of experts, in trainers whose argument weighs it."""

    def _hooks(self) -> TrainerHooks:
        """Methods as they are when they are called: a script may set others on the trainer at any time."""
        return TrainerHooks(
            compute_loss=lambda *given, **options: self.compute_loss(*given, **options),
            create_optimizer=lambda: self.create_optimizer(),
            evaluate=lambda: self.evaluate(),
            get_train_dataloader=lambda: self.get_train_dataloader(),
            log=lambda *given: self.log(*given),
            loss=lambda *given, **options: self.loss(*given, **options),
            settle_task=lambda: self._settle_task(),
            prediction_step=lambda *given: self.prediction_step(*given),
            save_checkpoint=self._save_progress,
            save_model=lambda *given, **options: self.save_model(*given, **options),
            script_values=lambda: script_values(self),
            set_by_script=lambda: vars(self).keys(),
        )
