"""Checks of TRL methods and attributes that scripts override or set, and placeholders for unsupported TRL names."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial, wraps
from inspect import Signature
from types import FunctionType, MethodType
from typing import Any, NoReturn

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import TrainingArguments

from trl_jax.config.base import BaseConfig
from trl_jax.core.text import hide_frames
from trl_jax.core.trainers import EXPERIMENTAL, TRAINERS
from trl_jax.data.batch import IGNORED
from trl_jax.tasks.task import Task

logger = logging.getLogger(__name__)

# Names of this or earlier TRL releases that are not implemented: importing them works, using them raises an error.


_REWARDED = "GRPOTrainer or RLOOTrainer, which train on completions that the model writes"
_PAIRS = "DPOTrainer, which trains on preference pairs"
_DISTILLED = "DistillationTrainer, where the student writes, or SFTTrainer on rows that the teacher wrote"
_JUDGE = "AutoModelForSequenceClassification with a trained reward model, as `trl-jax score` does"
_VALUE = "GRPOTrainer or RLOOTrainer, which need no value head"
_CALLBACK = "a TrainerCallback of the script's own, which gets the model as kwargs['model']"

# The closest alternative to each name; "" if there is none.
NEAR: dict[str, str] = {
    "AlignPropConfig": "", "AlignPropTrainer": "", "DDPOConfig": "", "DDPOTrainer": "",
    "DDPOStableDiffusionPipeline": "", "DefaultDDPOStableDiffusionPipeline": "",
    "AllTrueJudge": _JUDGE, "BaseBinaryJudge": _JUDGE, "BaseJudge": _JUDGE, "BasePairwiseJudge": _JUDGE,
    "BaseRankJudge": _JUDGE, "HfPairwiseJudge": _JUDGE, "OpenAIPairwiseJudge": _JUDGE, "PairRMJudge": _JUDGE,
    "AutoModelForCausalLMWithValueHead": _VALUE, "AutoModelForSeq2SeqLMWithValueHead": _VALUE,
    "PreTrainedModelWrapper": _VALUE,
    "NashMDConfig": _REWARDED, "NashMDTrainer": _REWARDED, "PPOConfig": _REWARDED, "PPOTrainer": _REWARDED,
    "PPOv2Config": _REWARDED, "PPOv2Trainer": _REWARDED, "TextEnvironment": _REWARDED, "TextHistory": _REWARDED,
    "XPOConfig": _REWARDED, "XPOTrainer": _REWARDED, "BestOfNSampler": "examples/best_of_n.py, which does its work",
    "BCOConfig": "KTOTrainer, which trains on answers that are good or bad",
    "BCOTrainer": "KTOTrainer, which trains on answers that are good or bad",
    "DPODataCollatorWithPadding": _PAIRS,
    "MiniLLMConfig": _DISTILLED, "MiniLLMTrainer": _DISTILLED,
    "LengthSampler": "max_completion_length of GRPOConfig or RLOOConfig",
    "PPODecorators": "nothing, for JAX frees memory by itself: leave it out",
    "IterativeSFTConfig": "SFTTrainer", "IterativeSFTTrainer": "SFTTrainer",
    "PRMConfig": "RewardTrainer, which scores whole answers", "PRMTrainer": "RewardTrainer, which scores whole answers",
    "MergeModelCallback": _CALLBACK, "MergeConfig": _CALLBACK, "WeaveCallback": _CALLBACK, "WinRateCallback": _CALLBACK,
    "SyncRefModelCallback": "DPOConfig(sync_ref_model=True), GRPOConfig too",
    "DataCollatorForChatML": "SFTConfig(assistant_only_loss=True) with rows of 'messages'",
}  # fmt: skip


# Trainers that TRL 1.16 only has in trl.experimental, without "Config" and "Trainer" -> (module, closest alternative).
_EXPERIMENTAL: dict[str, tuple[str, str]] = {
    "A2PO": ("a2po", _REWARDED), "AsyncDistillation": ("async_distillation", _DISTILLED),
    "GMPO": ("gmpo", _REWARDED), "GOLD": ("gold", _DISTILLED), "IWOPD": ("iw_opd", _DISTILLED),
    "SDFT": ("sdft", _DISTILLED), "SDPO": ("sdpo", _DISTILLED),
    "ServerDistillation": ("server_distillation", _DISTILLED), "TPO": ("tpo", _PAIRS),
}  # fmt: skip


def check_not_experimental(name: str) -> None:
    """Raise ImportError, as TRL 1.16 does, for a name that is only in trl.experimental, so that a script's
    `except ImportError` can import it from there."""
    for package, names in EXPERIMENTAL.items():
        if package not in TRAINERS and name in (names.trainer, names.config):
            raise ImportError(
                f"{name} is in trl_jax.experimental.{package}, because TRL only has it in trl.experimental."
            )
    module, near = _EXPERIMENTAL.get(name.removesuffix("Config").removesuffix("Trainer"), (None, None))
    if module is not None and name.endswith(("Config", "Trainer")):
        raise ImportError(
            f"{name} is not implemented in trl_jax. Closest: {near}. TRL has it in trl.experimental.{module}, which "
            "`python -m trl_jax` imports from the installed trl; it trains with torch."
        )


class _NotBuilt(type):
    """The metaclass of placeholders: calling them or reading their attributes raises NotImplementedError."""

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(_sentence(cls))

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        raise NotImplementedError(_sentence(cls))


def _sentence(cls: type) -> str:
    name = next(kind.__name__ for kind in cls.__mro__ if kind.__module__ == __name__)  # cls may be a user's subclass
    near = NEAR[name]
    return f"TRL's {name} is not implemented in trl_jax." + (f" Closest: {near}." if near else "")


def placeholder(name: str) -> type:
    """A class with this name whose use raises NotImplementedError, also in subclasses. Configs are dataclasses, so that
    a script can derive its own dataclasses from them."""
    kind = _NotBuilt(name, (), {"__module__": __name__, "__signature__": Signature()})  # read by dataclass
    return dataclass(kind) if name.endswith("Config") else kind


# Trainer attributes that hold argument values. TRL's losses read them in each step.


class MirroredArg:
    """A trainer attribute that is initialized from an argument and used instead of it from then on.

    A script may set it at any time: `make_task` reads the attribute, and the step is rebuilt if the task changes. A
    value set before `super().__init__` is overwritten there, as in TRL.
    """

    def __init__(self, argument: str, read: Callable[[Any], Any] | None = None):
        """
        Args:
            read: computes the attribute from the arguments; None: it is the value of `argument`.
        """
        self.argument, self._read = argument, read
        self.__doc__ = f"`args.{argument}`, or what was set since."

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        kept = vars(trainer).get("_mirrored", {})
        return kept[self._name] if self._name in kept else self.of(trainer.args)

    def __set__(self, trainer: Any, value: Any) -> None:
        if "_mirrored" in vars(trainer):
            trainer._mirrored[self._name] = value

    def of(self, args: Any) -> Any:
        """The attribute's initial value for these arguments."""
        return getattr(args, self.argument) if self._read is None else self._read(args)


class InitOnlyArg:
    """A trainer attribute that is only read in the constructor. Setting another value later raises AttributeError,
    which says what to do instead."""

    def __init__(self, read: Callable[[Any], Any], instead: str, argument: str | None = None):
        """
        Args:
            instead: a sentence; `{config}` is the name of the trainer's config class.
            argument: the argument that `read` returns; None if it returns something else.
        """
        self._read, self._instead, self.argument = read, instead, argument

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        return self if trainer is None else self._read(trainer)

    def __set__(self, trainer: Any, value: Any) -> None:
        if "parts" not in vars(trainer):
            return  # set before super().__init__, which overwrites it, as in TRL
        if value is not self._read(trainer) and value != self._read(trainer):
            raise self.error(trainer)
        if self.argument is not None:  # which may have changed
            vars(trainer).setdefault("_set_alike", {})[self._name] = value

    def error(self, trainer: Any) -> AttributeError:
        instead = self._instead.format(config=trainer.config_class.__name__)
        return AttributeError(f"{self._name} was set on the trainer, which does not read it again. {instead}")


def argument(name: str, read: Callable[[Any], Any] | None = None) -> InitOnlyArg:
    """A trainer attribute with an argument's value, or `read(args)`."""
    find = (lambda args: getattr(args, name)) if read is None else read
    return InitOnlyArg(lambda trainer: find(trainer.args), f"Set {name} in {{config}}.", name)


def init_only_args(trainer: Any) -> dict[str, Any]:
    """The current values of the arguments that are only read in the constructor, by attribute of the trainer."""
    return {
        name: one.__get__(trainer)
        for kind in reversed(type(trainer).__mro__)
        for name, one in vars(kind).items()
        if isinstance(one, InitOnlyArg) and one.argument in vars(trainer.args)
    }


def check_set_alike(trainer: Any, then: dict[str, Any]) -> None:
    """Raise AttributeError if an argument was changed and the trainer's attribute was then set to the same value, which
    the next step would not follow.

    Args:
        then: `init_only_args` after the constructor.
    """
    for name, value in vars(trainer).get("_set_alike", {}).items():
        if value is not then[name] and value != then[name]:
            raise inspect.getattr_static(type(trainer), name).error(trainer)


def mirrored_args(kind: type) -> dict[str, MirroredArg]:
    """The mirrored arguments of a trainer class, by attribute name."""
    return {
        name: value
        for base in reversed(kind.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, MirroredArg)
    }


def read_once(trainer: Any) -> dict[str, Any]:
    """The current values of the arguments that a trainer only reads in its constructor."""
    names = [kept.argument for kept in mirrored_args(type(trainer)).values()] + ["per_device_train_batch_size"]
    return {name: getattr(trainer.args, name) for name in names}


def warn_of_changes(trainer: Any, then: dict[str, Any]) -> None:
    """Warn about arguments that were changed since the constructor read them; `then`: their values at that time."""
    if names := [name for name, value in read_once(trainer).items() if value != then[name]]:
        warnings.warn(
            f"{', '.join(names)}: the arguments were changed after the trainer was made. As in TRL, this has no "
            f"effect{_instead(trainer, names)}.",
            stacklevel=4,  # the script's line: train() is an api_boundary, which adds a frame
        )


def _instead(trainer: Any, names: list[str]) -> str:
    kept = [name for name, kept in mirrored_args(type(trainer)).items() if kept.argument in names and name[0] != "_"]
    return f"; set trainer.{kept[0]} instead" if kept else ": create a new trainer"


def check_mirrored(trainer: Any) -> None:
    """Raise the config's ValueError if a value that was set on a trainer is invalid."""
    found = {kept.argument: getattr(trainer, name) for name, kept in mirrored_args(type(trainer)).items()}
    args = copy.copy(trainer.args)
    vars(args).update(found)
    args.check()


def check_same_rows(then: Task, now: Task, *, in_train: bool, config: str) -> None:
    """Raise ValueError if a changed task needs rows with other columns, or, during training, another step layout."""
    if then.columns != now.columns:
        raise ValueError(
            "What was set on the trainer since it was made needs rows with the columns "
            f"{', '.join(now.columns.texts)}, but they were prepared with {', '.join(then.columns.texts)}. Set it in "
            f"{config}."
        )
    if in_train and now.head == "lm" and then.whole_micro_batches != now.whole_micro_batches:
        raise ValueError(
            "What was set on the trainer during training needs another layout of its steps. Set it before train(), "
            f"or set it in {config}."
        )


# Methods that TRL's or transformers' trainers call on themselves but trl_jax never calls, and what to do instead.


_FOR_LOSS = "The step is one compiled function: override compute_loss(self, model, inputs, return_outputs=False)."
_FOR_DATA = "Override get_train_dataloader or get_eval_dataloader, or order the rows and set train_sampling_strategy."
_FOR_PROMPTS = (
    "A batch is made of completions when it is taken: order the rows of train_dataset, and set shuffle_dataset=False."
)
_FOR_RATES = "Override create_optimizer, or pass optimizers=(an optimizer of optax or torch, a schedule)."
_FOR_CALLBACKS = "Override evaluate, predict, save_model or log, or write a TrainerCallback."
_FOR_ARGUMENTS = "Use an argument of the config or of the trainer."
_LOSS_TYPE = (
    "The step is one compiled function: choose a loss_type, or override _compute_loss(self, model, inputs, "
    "return_outputs) of DPOTrainer or KTOTrainer in jax.numpy."
)
_POLICY_LOSS = (
    "The step is one compiled function: override _compute_loss(self, model, inputs), in jax.numpy, or choose loss_type."
)
_TEACHERS_LOSS = (
    "The step is one compiled function: override _compute_loss(self, model, inputs, num_items_in_batch) in jax.numpy, "
    "with self._get_per_token_divergences(model), or choose beta."
)
_FOR_REWARDS = (
    "Override _calculate_rewards, or write a reward function: it gets prompts, completions, completion_ids and all "
    "columns of the rows, log_metric and log_extra, and its results are weighted by reward_weights."
)
_FOR_COMPLETIONS = (
    "Override _generate(self, prompts) and change what super() returns, set the sampling with generation_kwargs, or "
    "pass a rollout_func(prompts, trainer) that returns them."
)
_FOR_SAMPLING = "Set the sampling of completions with generation_kwargs."
_FOR_TEXTS = "Render prompts beforehand with train_dataset.map, or set chat_template_path and chat_template_kwargs."


def _by_name(*entries: tuple[str, str]) -> dict[str, str]:
    """Each of the names, which are separated by spaces -> what to do instead."""
    return {name: instead for names, instead in entries for name in names.split()}


def _reworded(table: Mapping[str, str], words: Mapping[str, str]) -> dict[str, str]:
    """The table with some of its texts replaced."""
    return {name: words.get(instead, instead) for name, instead in table.items()}


NEVER_CALLED = _by_name(
    ("autocast_smart_context_manager compute_loss_context_manager _wrap_model _clip_grad_norm "
     "_get_grad_norm _get_num_items_in_batch get_batch_samples _run_epoch _inner_training_loop "
     "_prepare_for_training call_model_init _defer_fsdp_gradient_reduction _has_mixed_mesh_grads "
     "_mixed_mesh_grad_norm _sync_replicated_trainable_parameters _update_auto_batch_size", _FOR_LOSS),
    ("_get_eval_sampler _get_dataloader _get_collator_with_removed_columns "
     "_prepare_input _remove_unused_columns num_examples "
     "_prepare_context_parallel_inputs _reject_skip_prepare_without_labels", _FOR_DATA),
    ("create_optimizer_and_scheduler create_scheduler get_optimizer_cls_and_kwargs _get_learning_rate", _FOR_RATES),
    ("evaluation_loop _evaluate _maybe_log_save_evaluate _determine_best_metric _load_best_model _save "
     "_load_from_checkpoint _save_optimizer_and_scheduler _load_optimizer_and_scheduler _save_rng_state "
     "_load_rng_state _load_callback_state _push_from_checkpoint floating_point_ops store_flos "
     "_finalize_training _init_training_state _finish_current_push _get_output_dir _load_scaler _save_scaler "
     "_hp_search_setup _report_to_hp_search _tune_save_checkpoint _issue_warnings_after_load "
     "_track_num_input_tokens _send_telemetry", _FOR_CALLBACKS),
    ("_build_accelerator_args create_accelerator_and_postprocess _move_model_to_device _validate_args add_callback "
     "get_cp_size get_sp_size get_tp_size get_total_train_batch_size is_local_process_zero is_world_process_zero "
     "set_initial_training_values", _FOR_ARGUMENTS),
)  # fmt: skip
NEVER_CALLED_WITH_REFERENCE = _reworded(NEVER_CALLED, {_FOR_LOSS: _LOSS_TYPE}) | _by_name(
    ("compute_loss prediction_step training_step _compute_loss _compute_kl_logps _prepare_inputs "
     "compute_ref_log_probs _precompute_ref_logps", _LOSS_TYPE),
)  # fmt: skip
NEVER_CALLED_IN_PREFERENCES = {  # for DPO and KTO, which do call a user-defined loss
    name: instead
    for name, instead in NEVER_CALLED_WITH_REFERENCE.items()
    if name not in ("compute_loss", "_compute_loss", "training_step")
}
# Methods that earlier TRL trainers called on themselves: a script's override would silently have no effect.
_FOR_ROWS = "Prepare the rows beforehand with train_dataset.map."
ONCE_CALLED = _by_name(("_prepare_non_packed_dataloader _prepare_packed_dataloader", _FOR_ROWS))
ONCE_CALLED_WITH_REFERENCE = _by_name(
    ("dpo_loss kto_loss get_batch_loss_metrics get_batch_logps concatenated_forward compute_reference_log_probs "
     "compute_kl_logps", _LOSS_TYPE),
    ("concatenated_inputs tokenize_row process_row build_tokenized_answer", _FOR_ROWS),
)  # fmt: skip
_LOSS_OF_PAIRS = (
    "The step is one compiled function: choose the loss by the arguments of CPOConfig or ORPOConfig, or derive a "
    "trainer from ReferenceTrainer, with a task whose loss is your own."
)
# Methods that TRL's CPOTrainer and ORPOTrainer call on themselves.
ONCE_CALLED_WITH_PAIRS = ONCE_CALLED | _by_name(
    ("concatenated_forward cpo_loss odds_ratio_loss get_batch_logps get_batch_loss_metrics", _LOSS_OF_PAIRS),
    ("build_tokenized_answer concatenated_inputs tokenize_row _prepare_dataset", _FOR_ROWS),
    ("generate_from_model store_metrics", _FOR_CALLBACKS),
    ("training_step _prepare_inputs", _LOSS_OF_PAIRS),
)
ONCE_CALLED_WITH_REWARDS = {"_get_per_token_logps": _POLICY_LOSS}
# Attributes of TRL's trainers that affect training when a script sets them, but that trl_jax does not read.
NEVER_READ = {
    "neftune_noise_alpha": "Set neftune_noise_alpha in the arguments.",
    "_train_batch_size": "Set per_device_train_batch_size in the arguments.",
}


def _with_rollout(user_loss: str, own_completions: str, *further: tuple[str, str]) -> dict[str, str]:
    """NEVER_CALLED for an online trainer; `further` are pairs of (names, what to do instead)."""
    table = _reworded(NEVER_CALLED, {_FOR_DATA: _FOR_PROMPTS, _FOR_LOSS: user_loss})
    return table | _by_name(
        ("get_train_dataloader _get_train_sampler _prepare_dataset _prepare_inputs", _FOR_PROMPTS),
        ("prediction_step", user_loss),
        ("training_step", f"Do what follows a step in on_step_end of a TrainerCallback. {user_loss}"),
        ("_generate_single_turn _tool_call_loop _get_tool_suffix_ids", own_completions),
        *further,
    )


NEVER_CALLED_WITH_REWARDS = _with_rollout(
    _POLICY_LOSS,
    _FOR_COMPLETIONS,
    ("_get_per_token_logps_and_entropies get_high_entropy_mask get_off_policy_mask get_gamma_weights", _POLICY_LOSS),
    ("_log_completion_extra _log_metric", _FOR_REWARDS),
)
NEVER_CALLED_WITH_TEACHER = _with_rollout(
    _TEACHERS_LOSS,
    _FOR_SAMPLING,
    ("_get_last_hidden_state", _TEACHERS_LOSS),
    ("_generate _generate_and_score_completions", _FOR_SAMPLING),
    ("_tokenize_prompts", _FOR_TEXTS),
)
# Attributes of TRL's online trainers that a rollout_func may read, but that ours do not have.
NEVER_THERE = dict.fromkeys(
    ("vllm_generation", "vllm_client"),
    "Call trainer._generate_single_turn(prompt_ids, None, {}, num_generations), which asks the run's vLLM servers.",
)


class Absent:
    """An attribute of TRL's trainers that ours do not have until a script sets it. Reading it raises AttributeError,
    which says what to write instead."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type) -> Any:
        if trainer is None:
            return self
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self._name!r}. {NEVER_THERE[self._name]}",
            name=self._name, obj=trainer,
        )  # fmt: skip


OF_TORCH = (
    "create_optimizer may return torch's AdamW, Adam without weight decay, or SGD over the parameters of self.model, "
    "or an optax transformation. For groups with different learning rates in optax, use optax.multi_transform({'slow': "
    "optax.adamw(1e-5), 'fast': optax.adamw(1e-4)}, label), where label(params) maps each key of params to 'slow' or "
    "'fast'. To choose which parameters have weight decay, override get_decay_parameter_names."
)

# Methods that are only looked up on the class: setting them on an instance would have no effect.
OF_THE_CLASS = frozenset(
    "compute_loss get_decay_parameter_names prediction_step training_step _get_train_sampler _prepare_dataset "
    "_prepare_inputs _set_signature_columns_if_needed".split()
)

OLD_COMPUTE_LOSS = (
    ", with which transformers calls it since 4.46, under TRL, too. Write compute_loss(self, model, inputs, "
    "return_outputs=False, num_items_in_batch=None), and divide a sum over tokens by it unless it is None."
)


def classes_of_script(cls: type) -> list[type]:
    """The user-defined classes in the MRO of `cls`: subclasses of a trainer, and mixins."""
    return [kind for kind in cls.__mro__ if not _is_ours(kind)]


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "trl_jax"


def _package_of(function: FunctionType) -> str:
    """The top-level package that defines a function; "" if unknown."""
    return function.__globals__.get("__name__", "").partition(".")[0]


def loss_functions(cls: type, passed: Callable | None) -> list[Callable]:
    """The passed `compute_loss_func`, the user-defined loss methods, and the user-defined methods that they call."""
    own: dict[str, list[FunctionType]] = {}
    for kind in cls.__mro__:
        for name, value in vars(kind).items():
            function = inspect.unwrap(value) if isinstance(value, FunctionType | staticmethod) else None
            if function is not None and _package_of(function) != "trl_jax":
                own.setdefault(name, []).append(function)
    functions = [] if passed is None else [passed]
    names = ["compute_loss", "_compute_loss"]
    while names:
        called = own.pop(names.pop(0), [])
        functions += called
        names += [name for function in called for name in function.__code__.co_names if name in own]
    return functions


def names_of_script(cls: type) -> frozenset[str]:
    """The names that user-defined subclasses of a trainer and their mixins define, and the names of functions that a
    script has assigned to a class of trl_jax."""
    own = frozenset(name for kind in classes_of_script(cls) for name in vars(kind))
    return own | {name for kind in cls.__mro__ for name, value in vars(kind).items() if _is_of_script(kind, value)}


def _is_of_script(kind: type, value: Any) -> bool:
    """Whether an attribute of a trl_jax class is a function from outside of trl_jax."""
    return _is_ours(kind) and isinstance(value, FunctionType) and _package_of(value) != "trl_jax"


def check_overridden(cls: type, never_called: Mapping[str, str]) -> None:
    """Raise TypeError if a subclass overrides a method that is never called."""
    if unheard := sorted(names_of_script(cls) & never_called.keys()):
        raise TypeError(
            f"{cls.__name__} overrides {', '.join(unheard)}, which trl_jax never calls. "
            + " ".join(dict.fromkeys(never_called[name] for name in unheard))
        )


def warn_of_patched_trainer(kind: type) -> None:
    """Warn if a script has replaced methods of transformers' Trainer, which TRL's trainers inherit and ours do not."""
    trainer = vars(sys.modules["transformers.trainer"])["Trainer"] if "transformers.trainer" in sys.modules else object
    replaced = [
        name
        for name, method in vars(trainer).items()
        if isinstance(method, FunctionType) and _package_of(method) not in ("transformers", "trl_jax", "contextlib")
    ]
    if replaced:
        logger.warning(
            "The script replaces %s of transformers.Trainer, which trainers of trl_jax do not inherit, so this has no "
            "effect on them. Override it in a subclass of %s, or set %s.%s instead.",
            ", ".join(sorted(replaced)), kind.__name__, kind.__name__, min(replaced),
        )  # fmt: skip


def check_set(
    names: Collection[str], cls: type, never_called: Mapping[str, str], never_read: Mapping[str, str]
) -> None:
    """Raise TypeError if a script set a method on a trainer instance that is never called or only looked up on the
    class, or an attribute that is never read."""
    if unread := sorted(never_read.keys() & names):
        raise TypeError(f"{unread[0]} was set on the trainer, and trl_jax never reads it. {never_read[unread[0]]}")
    if unheard := sorted(never_called.keys() & names):
        raise TypeError(f"{unheard[0]} was set on the trainer, and trl_jax never calls it. {never_called[unheard[0]]}")
    if compiled := sorted(cls._compiled_methods & names):
        raise TypeError(
            f"{compiled[0]} was set on the trainer instance, but trl_jax calls the method of its class. Define "
            f"{compiled[0]} in a subclass of {cls.__name__}."
        )


def check_generate(*models: Any) -> None:
    """Raise ValueError if a script replaced `generate` of a model, which is never called to complete prompts.

    Args:
        models: loaded models, folders, Hub names or None.
    """
    for model in models:
        if model is None or isinstance(model, str | os.PathLike):
            continue
        parts = (model, model.get_base_model()) if "peft_config" in vars(model) else (model,)
        if any(map(_writes_otherwise, parts)):
            raise ValueError(
                f"generate of the {type(model).__name__} was replaced by the script, and trl_jax never calls it to "
                "complete prompts. Undo it, and set the sampling with generation_kwargs (GRPO, RLOO), or write the "
                "completions in a rollout_func(prompts, trainer)."
            )


def _writes_otherwise(model: Any) -> bool:
    """Whether `generate` of a model or of its class is a script's."""
    own = next((vars(kind)["generate"] for kind in type(model).__mro__ if "generate" in vars(kind)), None)
    made = vars(model).get("generate")
    while isinstance(made, partial) and not made.args and not made.keywords:
        made = made.func
    if made is not None and (own is None or made != MethodType(own, model)):
        return True
    libraries = "peft", "torch", "transformers", "trl_jax"
    while isinstance(own, FunctionType):  # a decorator and the function that it wraps may be of different packages
        if _package_of(own) not in libraries:
            return True
        own = vars(own).get("__wrapped__")
    return False


def refuse(**given: Any) -> None:
    """Raise ValueError if an unsupported argument is not None."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} is not in this release of trl_jax. Leave it out.")


def accepting_old_keywords(*moved: str, first: Callable | None = None) -> Callable[[Callable], Callable]:
    """Make a trainer's `__init__` check its arguments, and accept old ones with a FutureWarning.

    Args:
        moved: names, old or current, of arguments that have moved to the config.
        first: (trainer, args, kwargs) -> kwargs, which translates the arguments of an old constructor.
    """
    return partial(_accepting, frozenset(moved), first)


def _accepting(moved: frozenset[str], first: Callable | None, init: Callable) -> Callable:
    accepted = inspect.signature(init).parameters
    order = list(accepted)[1:]  # without self

    @wraps(init)
    def wrapped(self, *args: Any, **kwargs: Any) -> None:
        try:
            if first is not None:
                kwargs = first(self, args, kwargs)
            check_places(type(self).__name__, order, dict(zip(order, args, strict=False)) | kwargs)
            if not kwargs.keys() <= accepted.keys():
                from trl_jax.legacy.arguments import modern_keywords

                args, kwargs = modern_keywords(type(self), moved, accepted, args, kwargs)
            init(self, *args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    wrapped.moved = moved
    return wrapped


def as_config(args: TrainingArguments, kind: type[BaseConfig]) -> BaseConfig:
    """`args`, converted to `kind` if it is a TrainingArguments, which scripts for early TRL pass.

    Raises:
        TypeError: args is neither.
    """
    if isinstance(args, kind):
        return args
    from trl_jax.legacy.arguments import from_training_arguments

    return from_training_arguments(args, kind)


def check_places(trainer: str, order: Sequence[str], given: Mapping[str, Any]) -> None:
    """Raise TypeError for a config, a dataset or a tokenizer that was passed as the wrong argument.

    Args:
        trainer: the name of the class.
        order: the names of its positional arguments, in order.
        given: the arguments that were passed, by name.
    """
    module = sys.modules.get("transformers.tokenization_utils_base")  # without it, there can be no tokenizer
    places = {
        TrainingArguments: ("args",),
        Dataset | IterableDataset | DatasetDict | IterableDatasetDict: ("train_dataset", "eval_dataset"),
        () if module is None else module.PreTrainedTokenizerBase: ("processing_class", "reward_processing_classes"),
    }
    for name, value in given.items():
        for kind, (place, *others) in places.items():
            if isinstance(value, kind) and name in order and name not in (place, *others):
                until = ", ".join(order[: order.index(place) + 1])
                raise TypeError(
                    f"{name} of {trainer} is a {type(value).__name__}. Pass it as {place}=: by position, the arguments "
                    f"are {until} and so on, as in TRL."
                )


NO_COLLATOR = (
    "trl_jax calls user-defined collate functions only in SFTTrainer, for rows of text. Leave data_collator out and "
    "train on the columns directly (`messages`, or `prompt` and `completion`, with `images` if there are any): the "
    "trainer applies the chat template and the processor, and the config determines which tokens have labels."
)


_LEGACY, _TRANSFORMERS = "trl_jax.legacy.collators", "transformers.data.data_collator"


def is_older_collator(collator: Any, names: tuple[str, ...]) -> bool:
    """Whether it is one of these collators of early TRL, or transformers' DataCollatorForSeq2Seq if it is among them.
    By name, because only scripts that use one import them."""
    kind = type(collator)
    home = _TRANSFORMERS if kind.__name__ == "DataCollatorForSeq2Seq" else _LEGACY
    return kind.__module__ == home and kind.__name__ in names


def _check_seq2seq(collator: Any) -> None:
    """Raise ValueError if transformers' DataCollatorForSeq2Seq would give other batches than TRL's own collator, apart
    from padding on the right, or none."""
    tokenizer = collator.tokenizer
    wanted = (
        ("label_pad_token_id", collator.label_pad_token_id, (IGNORED,)),
        ("padding", collator.padding, (True, "longest", "max_length")),
        ("return_tensors", collator.return_tensors, ("pt",)),
        ("tokenizer.padding_side", tokenizer.padding_side, ("right",)),
    )
    for name, found, allowed in wanted:
        if found not in allowed:
            raise ValueError(
                f"DataCollatorForSeq2Seq has {name}={found!r}, which is not in this release of trl_jax. Set it to "
                f"{' or '.join(map(repr, allowed))}, or leave data_collator out."
            )
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "Asking to pad but the tokenizer does not have a padding token. Set tokenizer.pad_token, such as "
            "tokenizer.pad_token = tokenizer.eos_token, or leave data_collator out."
        )


def _instead_of(collator: Any, known: tuple[type, ...]) -> str:
    """What a script may pass instead of a collator that is refused."""
    kind = type(collator)
    own = f", or pass a {known[0].__name__}, whose pad_to_multiple_of is taken" if known else ""
    usual = f"Leave it out{own}: rows are padded as TRL's own collator does."
    if kind.__module__ != _TRANSFORMERS or kind.__name__ != "DataCollatorForLanguageModeling" or not known:
        return usual
    if collator.mlm:
        return f"{usual} A causal language model is not trained with mlm=True."
    return (
        f"{usual} TRL 1.16 cannot pad rows of different lengths with it either, because it does not pad the labels "
        "that SFTTrainer prepares. To leave tokens out of the loss, set their labels to -100 in a column 'labels'."
    )


def is_own_collator(collator: Any, known: tuple[type, ...], older: tuple[str, ...] = ()) -> bool:
    """Whether a collator is a script's own: neither of a class in `known`, nor one that is named in `older`, nor
    transformers' for masked language models."""
    masks = type(collator).__module__ == _TRANSFORMERS and vars(collator).get("mlm", False)
    return callable(collator) and type(collator) not in known and not is_older_collator(collator, older) and not masks


def check_collator(collator: Any, known: tuple[type, ...], older: tuple[str, ...] = ()) -> None:
    """Raise ValueError for a collator whose class is neither in `known` nor one of early TRL that is named in `older`,
    because these collators are never called."""
    if collator is None or type(collator) in known or is_older_collator(collator, older):
        if type(collator).__module__ == _TRANSFORMERS:
            _check_seq2seq(collator)
        return
    name = type(collator).__qualname__
    if isinstance(collator, FunctionType | MethodType | partial):
        raise ValueError(f"data_collator is a {name}. {NO_COLLATOR}")
    raise ValueError(
        f"data_collator={type(collator).__module__}.{name}(...) is not in this release of trl_jax. "
        f"{_instead_of(collator, known)}"
    )


def check_config(trainer: type, base: type, optional: tuple[str, ...] = ()) -> None:
    """Raise TypeError if a trainer's config class lacks fields of `base`, other than the `optional` ones."""
    found = {field.name for field in fields(trainer.config_class)}
    missing = [field.name for field in fields(base) if field.name not in {*found, *optional}]
    if missing:
        raise TypeError(
            f"config_class of {trainer.__name__} is {trainer.config_class.__name__}, which has no field "
            f"{', '.join(missing)}: wanted a dataclass derived from {base.__name__}."
        )


def check_lengths(collator: Any, args: Any) -> None:
    """Raise ValueError if a collator would truncate texts differently from the arguments."""
    for name in ("max_length", "truncation_mode"):
        if name in vars(collator) and vars(collator)[name] != vars(args)[name]:
            raise ValueError(
                f"data_collator has {name}={vars(collator)[name]!r}, the arguments {name}={vars(args)[name]!r}: rows "
                "are cut once, when they are prepared. Write the same in both, or leave the collator out."
            )


def one_processor(processor: Any, processing_class: Any) -> Any:
    """The processor of a vision collator, which is also the trainer's `processing_class`.

    Raises:
        ValueError: a different `processing_class` was passed.
    """
    if processing_class is None or processing_class is processor or processing_class is processor.tokenizer:
        return processor
    raise ValueError(
        "data_collator has a different processor than processing_class. A run has one tokenizer and one image "
        "processor: pass the same to both."
    )


def check_compute_loss(cls: type, head: str) -> None:
    """Raise TypeError if the `compute_loss` of a language model does not take `num_items_in_batch`."""
    parameters = inspect.signature(cls.compute_loss).parameters
    takes = "num_items_in_batch" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    if head == "lm" and not takes:
        raise TypeError(f"{cls.__name__}.compute_loss takes no num_items_in_batch{OLD_COMPUTE_LOSS}")
