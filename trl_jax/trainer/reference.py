"""The base classes of preference trainers, with and without a reference model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, ClassVar

from datasets import Dataset, IterableDataset
from transformers.trainer_callback import TrainerCallback

from trl_jax.config.base import BaseConfig
from trl_jax.config.shared import shared
from trl_jax.hub.peft_backend import AdaptedBackend
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.torch_objects import is_torch_model
from trl_jax.tasks.task import Task
from trl_jax.trainer.arguments import InitOnlyAttribute, accepting_old_keywords, as_config, check_config, refuse
from trl_jax.trainer.base_trainer import BaseTrainer
from trl_jax.trainer.collators import VisionCollator, check_lengths
from trl_jax.trainer.overrides import REFUSED_WITH_REFERENCE, REFUSED_WITHOUT_REFERENCE, TrainerTraits, names_of_script
from trl_jax.training import model, setup
from trl_jax.training.forward import balance_experts
from trl_jax.training.reference import ReferenceModel, Sync, check_sync, given, initial_policy
from trl_jax.training.reference_logps import precomputed
from trl_jax.training.setup import Policy
from trl_jax.training.state import Hooks

# Without a reference model: ORPO and CPO.


class ReferenceFreeTrainer(BaseTrainer):
    """A trainer of language models on preference pairs, without a reference model.

    The arguments are those of TRL's trainers in `trl.experimental`, in TRL's order.

    Args:
        model: a checkpoint's folder or Hub name, a model that `trl_jax.AutoModelForCausalLM` loaded, or a torch model
            of transformers, which receives the trained weights after `train()`. Weights are kept in float32 and saved
            in `args.model_init_kwargs["dtype"]` ("float32" by default).
        args: a `config_class`; None means `config_class("<model>-<name>")`.
        train_dataset: pairs, `chosen` and `rejected` with or without `prompt`, as text or as messages; a Dataset or an
            IterableDataset (with `max_steps`).
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; loaded with the model if None. Its pad token is set if it has none.
        callbacks: transformers callbacks, in addition to the default ones.
        optimizers: an optax transformation that includes its learning rate, and None or a function of the step. The
            function scales the updates; without it, the schedule of `args` does, relative to its peak.
        peft_config: our or peft's LoraConfig or prompt-learning config: an adapter of the frozen model is trained, and
            only the adapter is saved.
        quantization_config: our or transformers' BitsAndBytesConfig, which loads the base model of an adapter in 4 or 8
            bits (QLoRA).
        data_collator, model_init, preprocess_logits_for_metrics, compute_metrics: must be None. (In TRL,
            compute_metrics gets two means per batch.)

    Raises:
        TypeError, ValueError: names the invalid argument, row or checkpoint.
    """

    _traits = TrainerTraits(refused=REFUSED_WITHOUT_REFERENCE)

    @accepting_old_keywords()
    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel | None = None,
        args: BaseConfig | None = None,
        data_collator: None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: Any = None,
        model_init: None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: None = None,
        peft_config: Any = None,
        compute_metrics: Callable | None = None,
        *,
        quantization_config: Any = None,
    ):
        refuse(
            data_collator=data_collator, model_init=model_init, compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )  # fmt: skip
        super().__init__(
            model, None if args is None else as_config(args, self.config_class), None, train_dataset, eval_dataset,
            processing_class, callbacks=callbacks, optimizers=optimizers,
            quantization_config=quantization_config, peft_config=peft_config,
        )  # fmt: skip

    def _balance_experts(self, model: PreTrainedModel, args: BaseConfig) -> float:
        """As in TRL, only the model's config matters: its coefficient if `output_router_logits` is set, else 0."""
        del args
        requested = model.config.get_text_config().to_dict().get("output_router_logits", False)
        return balance_experts(model, None if requested else 0.0)


# With a reference model: one that the script passes, or the policy before training.


def loaded_reference(args: BaseConfig, policy: Policy, ref_model: Any, *, fresh_adapter: bool) -> ReferenceModel:
    """The reference model as used by a step. If `ref_model` is None, it is the current policy, or the base model of a
    new adapter."""
    if ref_model is None:
        return initial_policy(policy.model, fresh_adapter=fresh_adapter)
    as_bits = policy.sharding_plan is None and not args.sync_ref_model
    loaded = model.load_reference(ref_model, args, images=policy.has_tower)
    return given(loaded, policy.vocab_size, as_bits=as_bits)


def policy_reference(args: BaseConfig, policy: Policy, ref_model: Any, *, fresh_adapter: bool) -> ReferenceModel:
    """As `loaded_reference`; with `sync_ref_model`, the reference is updated from the policy during training."""
    reference = loaded_reference(args, policy, ref_model, fresh_adapter=fresh_adapter)
    if not args.sync_ref_model:
        return reference
    check_sync(policy.model)
    sync = Sync(args.ref_model_mixup_alpha, args.ref_model_sync_steps)
    return reference.following(sync, policy.model.arrays)


def reference_as_model(
    reference: ReferenceModel | None, policy: PreTrainedModel, ref_model: Any
) -> PreTrainedModel | None:
    """The current reference, for `trainer.ref_model`. None if it is not a separate model in memory: without a
    reference, with `precompute_ref_log_probs`, and with an adapter unless `ref_model` was passed."""
    if reference is None or (ref_model is None and isinstance(policy.backend, AdaptedBackend)):
        return None
    return reference.as_model(policy)


def set_reference(trainer: Any, ref_model: Any) -> None:
    """Give the reference of a trainer the values of another model, for `trainer.ref_model = ref_model`.

    Raises:
        AttributeError: the trainer has no reference model of its own, or `ref_model` is None.
        TypeError: `ref_model` is not a model.
    """
    if "parts" not in vars(trainer):
        return  # set before super().__init__, which overwrites it, as in TRL
    current = trainer.ref_model
    if current is None and ref_model is not None:
        raise AttributeError(
            f"ref_model was set on a {type(trainer).__name__} without a reference model of its own. With an adapter, "
            "the reference is the base model: put the adapter on the model that is to be the reference. With "
            "precompute_ref_log_probs=True, it is only needed before training. Without a KL penalty there is none: set "
            "beta in the arguments."
        )
    if current is not None and ref_model is None:
        raise AttributeError("ref_model was set to None, but the steps compute with it. Set beta in the arguments.")
    if current is not None:
        if not isinstance(ref_model, PreTrainedModel) and not is_torch_model(ref_model):
            raise TypeError(
                f"ref_model was set to a {type(ref_model).__name__}; expected a model, as from "
                "AutoModelForCausalLM.from_pretrained."
            )
        current.load_state_dict(ref_model.state_dict())


def check_image_arguments(args: BaseConfig) -> None:
    """Raise ValueError for arguments that are not supported for rows with images."""
    if args.precompute_ref_log_probs:
        raise ValueError(
            "`precompute_ref_log_probs=True` is not supported for vision datasets, whose rows are processed on the "
            "fly. Set `precompute_ref_log_probs=False`."
        )
    if args.max_prompt_length is not None:
        raise ValueError(
            f"max_prompt_length={args.max_prompt_length} is not supported for rows with images: it would cut images "
            "off the start of prompts. Use max_length, which cuts the end, or leave it out."
        )


@dataclasses.dataclass(repr=False)
class ReferenceConfig(BaseConfig):
    """The arguments of all trainers with a reference model. Derive the config of your own trainer from it."""

    router_aux_loss_coef: float | None = shared("router_aux_loss_coef")
    disable_dropout: bool = shared("disable_dropout")
    dataset_num_proc: int | None = shared("dataset_num_proc")
    max_length: int | None = shared("max_length")
    truncation_mode: str = shared("truncation_mode")
    pad_to_multiple_of: int | str | None = shared("pad_to_multiple_of")
    precompute_ref_log_probs: bool = shared("precompute_ref_log_probs")
    precompute_ref_batch_size: int | None = shared("precompute_ref_batch_size")
    activation_offloading: bool = shared("activation_offloading")
    sync_ref_model: bool = shared("sync_ref_model")
    ref_model_mixup_alpha: float = shared("ref_model_mixup_alpha")
    ref_model_sync_steps: int = shared("ref_model_sync_steps")
    max_prompt_length: int | None = shared("max_prompt_length")
    chat_template_path: str | None = shared("chat_template_path", kw_only=True)


class ReferenceTrainer(BaseTrainer):
    """A trainer of language models that compares the policy with a reference model. To derive your own trainer, set
    `config_class` to a dataclass derived from `ReferenceConfig`, and implement `make_task`.

    The task's optional number columns are the reference's log-probabilities of each text, computed in the step or, with
    `precompute_ref_log_probs`, before training. A task with `compared = ()` trains without a reference.
    """

    config_class = ReferenceConfig
    _traits = TrainerTraits(refused=REFUSED_WITH_REFERENCE)
    precompute_ref_logps = InitOnlyAttribute(
        # Whether batches have the reference's log-probabilities: in a user-defined loss they always do.
        lambda trainer: trainer._in_user_loss or trainer.args.precompute_ref_log_probs,
        "Set precompute_ref_log_probs in the arguments.",
    )
    _changes_logps: ClassVar[tuple[str, ...]] = ()  # attributes that change the log-probability of a text
    _adds_logps = False  # whether `prepare_dataset` adds the reference's log-probabilities

    def __init__(self, model: Any, ref_model: Any = None, *, peft_config: Any = None, **arguments: Any):
        """
        Args:
            ref_model: the reference model; None: the model before training.
            arguments: the other arguments of `BaseTrainer`, by name.

        Raises:
            TypeError: `config_class` has no field for an argument that this class reads.
        """
        check_config(type(self), ReferenceConfig, ("max_prompt_length", "truncation_mode"))
        if ref_model is not None and ref_model is model and not isinstance(model, str | os.PathLike):
            raise ValueError(
                "`model` and `ref_model` cannot be the same object. In most cases you should omit `ref_model`: the "
                "model before training is then the reference."
            )
        self._ref_model, self._fresh_adapter = ref_model, peft_config is not None
        user_loss = {"compute_loss", "_compute_loss"} & names_of_script(type(self))
        if user_loss and arguments.get("compute_metrics") is not None:
            raise ValueError(
                f"compute_metrics gets whole logits, which {type(self).__name__}.{min(user_loss)} does not return "
                "here. Leave compute_metrics out, and append numbers to self._metrics[mode][name] in the loss."
            )
        super().__init__(model, peft_config=peft_config, **arguments)
        if not isinstance(self.data_collator, VisionCollator | type(None)):
            check_lengths(self.data_collator, self.args)
        if self.args.precompute_ref_log_probs:
            self._precompute()

    def _hooks(self) -> Hooks:
        hooks = super()._hooks()
        methods = hooks.batch_methods | (hooks.overridden & {"_compute_loss"})
        return hooks._replace(batch_methods=methods, loss_compares=bool(methods))

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Call `_compute_loss`, as in TRL. Subclasses of DPOTrainer and KTOTrainer may override either."""
        return self._compute_loss(model, inputs, return_outputs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """The mean loss of a micro-batch. Subclasses of DPOTrainer and KTOTrainer may override it: in jax.numpy it is
        compiled together with its gradient; in torch it gets the model's outputs as tensors.

        Args:
            model: `model(input_ids=..., attention_mask=..., labels=..., fused_lm_head=True)` returns `log_probs` and
                `entropy` `[rows, T - 1]` without materializing the logits, as in TRL.
            inputs: `input_ids`, `attention_mask`, `completion_mask` `[rows, T]` and the reference's log-probabilities.
                For DPO, rows = 2 B, chosen completions first, with `ref_chosen_logps` and `ref_rejected_logps` `[B]`.
                For KTO, rows = B, also with the prefix `KL_`, with `label`, `ref_logps` and `ref_KL_logps` `[B]`.
                `pixel_values` `[P, C]` are the patches of all images, if any; every call needs all of them.
            return_outputs: return `(loss, outputs)`.
        """
        loss, outputs = model.default_loss(self._setup.task, inputs, None)
        return (loss, outputs) if return_outputs else loss

    @property
    def _in_user_loss(self) -> bool:
        return self._super_calls.metrics is not None

    @property
    def ref_model(self) -> PreTrainedModel | None:
        """The current reference model; None if it is not a separate model in memory."""
        if self._in_user_loss:
            raise TypeError(
                "_compute_loss reads ref_model, whose weights are not part of the compiled step. The reference's "
                f"log-probabilities are inputs[{self._setup.task.columns.optional[0]!r}] and so on."
            )
        return reference_as_model(self._setup.reference, self.model, self._ref_model)

    @ref_model.setter
    def ref_model(self, ref_model: Any) -> None:
        set_reference(self, ref_model)

    def _balance_experts(self, model: PreTrainedModel, args: BaseConfig) -> float:
        return balance_experts(model, args.router_aux_loss_coef)

    def _make_reference(self, args: BaseConfig, task: Task, policy: Policy) -> ReferenceModel | None:
        """The reference that the step evaluates; None if there is none or its log-probabilities are precomputed."""
        if not task.compared:
            self._refuse_reference(args, task)
        if not task.compared or args.precompute_ref_log_probs:
            return None
        return policy_reference(args, policy, self._ref_model, fresh_adapter=self._fresh_adapter)

    def _other_models(self) -> dict[str, Any]:
        return {"ref_model": self._ref_model}

    def _refuse_reference(self, args: BaseConfig, task: Task) -> None:
        """Raise ValueError if a reference was requested, because the task does not use one."""
        names = [name for name in ("precompute_ref_log_probs", "sync_ref_model") if vars(args)[name]]
        if self._ref_model is not None:
            names.append("ref_model")
        if names:
            raise ValueError(
                f"{' and '.join(names)} was set, but {type(task).__name__} has compared = (), so it trains without "
                f"a reference. Leave {' and '.join(names)} out."
            )

    def prepare_dataset(self, dataset: Any, name: str, *, bounded: bool = True) -> Dataset | IterableDataset:
        prepared = super().prepare_dataset(dataset, name, bounded=bounded)
        return self._with_reference(prepared, name) if self._adds_logps else prepared

    def _precompute(self) -> None:
        """Add the reference's log-probabilities to all datasets, and to those that are prepared later."""
        self._adds_logps = True
        self.train_dataset = self._with_reference(self.train_dataset, "train")
        if isinstance(self.eval_dataset, dict):
            self.eval_dataset = {name: self._with_reference(part, name) for name, part in self.eval_dataset.items()}
        elif self.eval_dataset is not None:
            self.eval_dataset = self._with_reference(self.eval_dataset, "eval")

    def _with_reference(self, dataset: Dataset, name: str) -> Dataset:
        run, args = self._setup, self.args
        policy, columns = Policy(run.model, run.vocab_size, run.sharding_plan), run.task.columns.optional
        reference = loaded_reference(args, policy, self._ref_model, fresh_adapter=self._fresh_adapter)
        if run.state.global_step and self._ref_model is None and reference.arrays:
            if set(columns) <= set(dataset.column_names or ()):  # prepared before training, such as self.eval_dataset
                return dataset
            raise ValueError(
                "Cannot compute reference log-probs for a dataset passed to `evaluate()` after training has started, "
                "because `precompute_ref_log_probs=True` and no `ref_model` was provided: the model as it was is not "
                "kept. Pass this dataset as `eval_dataset` to the trainer, pass a `ref_model`, or set "
                "`precompute_ref_log_probs=False`."
            )
        default = args.per_device_train_batch_size if name == "train" else args.per_device_eval_batch_size
        batch_size = args.precompute_ref_batch_size or default
        reference, plan = setup.divide_reference(reference, run.sharding_plan)
        # A copy of the setup whose passes evaluate the reference.
        comparing = dataclasses.replace(run, reference=reference, sharding_plan=plan)
        cache_key = {name: getattr(self, name) for name in self._changes_logps}
        options = {"batch_size": batch_size, "name": name, "cache_key": cache_key}
        return precomputed(comparing, dataset, columns, **options)
