"""What a trainer class accepts from a script: what may be passed, overridden or set, and which names of TRL are
refused because trl_jax never calls or reads them."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from trl_jax.data.chat import PartsTokenizer, ProcessorTokenizer
from trl_jax.trainer.collators import AcceptedCollators

logger = logging.getLogger(__name__)

# Methods that are only looked up on the class: setting them on an instance would have no effect.
_OF_THE_CLASS = frozenset(
    "compute_loss get_decay_parameter_names prediction_step training_step _get_train_sampler _prepare_dataset "
    "_prepare_inputs _set_signature_columns_if_needed".split()
)
# Attributes of TRL's trainers that affect training when a script sets them, but that trl_jax does not read.
_NEVER_READ = {
    "neftune_noise_alpha": "Set neftune_noise_alpha in the arguments.",
    "_train_batch_size": "Set per_device_train_batch_size in the arguments.",
}


@dataclass(frozen=True)
class RefusedNames:
    """Names of TRL's trainers that a script may not override, set or read. Tables map a name to what to do instead.

    never_called: methods that may be neither overridden nor set.
    once_called: methods of earlier TRL releases that may not be overridden.
    of_the_class: methods that a subclass may override, and that may not be set on an instance.
    never_read: attributes that may not be set.
    never_there: attributes that TRL's trainers have and ours do not.
    """

    never_called: dict[str, str]
    once_called: dict[str, str]
    of_the_class: frozenset[str] = _OF_THE_CLASS
    never_read: dict[str, str] = field(default_factory=lambda: _NEVER_READ)
    never_there: dict[str, str] = field(default_factory=dict)

    def check_class(self, cls: type) -> None:
        """Raise TypeError if a subclass overrides a method that is never called."""
        never_called = {**self.never_called, **self.once_called}
        if unheard := sorted(names_of_script(cls) & never_called.keys()):
            raise TypeError(
                f"{cls.__name__} overrides {', '.join(unheard)}, which trl_jax never calls. "
                + " ".join(dict.fromkeys(never_called[name] for name in unheard))
            )

    def check_instance(self, cls: type, names: Collection[str]) -> None:
        """Raise TypeError if a script set a method on a trainer instance that is never called or only looked up on the
        class, or an attribute that is never read."""
        if unread := sorted(self.never_read.keys() & names):
            raise TypeError(
                f"{unread[0]} was set on the trainer, and trl_jax never reads it. {self.never_read[unread[0]]}"
            )
        if unheard := sorted(self.never_called.keys() & names):
            raise TypeError(
                f"{unheard[0]} was set on the trainer, and trl_jax never calls it. {self.never_called[unheard[0]]}"
            )
        if compiled := sorted(self.of_the_class & names):
            raise TypeError(
                f"{compiled[0]} was set on the trainer instance, but trl_jax calls the method of its class. Define "
                f"{compiled[0]} in a subclass of {cls.__name__}."
            )


# What to do instead of overriding a method that TRL's or transformers' trainers call on themselves.


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
_FOR_ROWS = "Prepare the rows beforehand with train_dataset.map."
_LOSS_OF_PAIRS = (
    "The step is one compiled function: choose the loss by the arguments of CPOConfig or ORPOConfig, or derive a "
    "trainer from ReferenceTrainer, with a task whose loss is your own."
)


def by_name(*entries: tuple[str, str]) -> dict[str, str]:
    """Each of the names, which are separated by spaces -> what to do instead."""
    return {name: instead for names, instead in entries for name in names.split()}


def _reworded(table: Mapping[str, str], words: Mapping[str, str]) -> dict[str, str]:
    """The table with some of its texts replaced."""
    return {name: words.get(instead, instead) for name, instead in table.items()}


_NEVER_CALLED = by_name(
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
# Attributes of TRL's online trainers that a rollout_func may read, but that ours do not have.
_NEVER_THERE = dict.fromkeys(
    ("vllm_generation", "vllm_client"),
    "Call trainer._generate_single_turn(prompt_ids, None, {}, num_generations), which asks the run's vLLM servers.",
)

REFUSED = RefusedNames(
    _NEVER_CALLED,
    # A script's override of these would silently have no effect.
    once_called=by_name(("_prepare_non_packed_dataloader _prepare_packed_dataloader", _FOR_ROWS)),
)
REFUSED_WITH_REFERENCE = RefusedNames(
    _reworded(_NEVER_CALLED, {_FOR_LOSS: _LOSS_TYPE})
    | by_name(
        ("compute_loss prediction_step training_step _compute_loss _compute_kl_logps _prepare_inputs "
         "compute_ref_log_probs _precompute_ref_logps", _LOSS_TYPE),
    ),
    once_called=by_name(
        ("dpo_loss kto_loss get_batch_loss_metrics get_batch_logps concatenated_forward compute_reference_log_probs "
         "compute_kl_logps", _LOSS_TYPE),
        ("concatenated_inputs tokenize_row process_row build_tokenized_answer", _FOR_ROWS),
    ),
)  # fmt: skip
REFUSED_IN_PREFERENCES = replace(  # for DPO and KTO, which do call a user-defined loss
    REFUSED_WITH_REFERENCE,
    never_called={
        name: instead
        for name, instead in REFUSED_WITH_REFERENCE.never_called.items()
        if name not in ("compute_loss", "_compute_loss", "training_step")
    },
    of_the_class=_OF_THE_CLASS | {"_compute_loss"},
)
REFUSED_WITHOUT_REFERENCE = replace(  # for CPO and ORPO, whose trainers in TRL call these methods on themselves
    REFUSED,
    once_called=REFUSED.once_called
    | by_name(
        ("concatenated_forward cpo_loss odds_ratio_loss get_batch_logps get_batch_loss_metrics", _LOSS_OF_PAIRS),
        ("build_tokenized_answer concatenated_inputs tokenize_row _prepare_dataset", _FOR_ROWS),
        ("generate_from_model store_metrics", _FOR_CALLBACKS),
        ("training_step _prepare_inputs", _LOSS_OF_PAIRS),
    ),
)
REFUSED_IN_ROLLOUTS = replace(REFUSED, of_the_class=_OF_THE_CLASS | {"_compute_loss"}, never_there=_NEVER_THERE)


def _with_rollout(user_loss: str, own_completions: str, *further: tuple[str, str]) -> dict[str, str]:
    """_NEVER_CALLED for an online trainer; `further` are pairs of (names, what to do instead)."""
    table = _reworded(_NEVER_CALLED, {_FOR_DATA: _FOR_PROMPTS, _FOR_LOSS: user_loss})
    return table | by_name(
        ("get_train_dataloader _get_train_sampler _prepare_dataset _prepare_inputs", _FOR_PROMPTS),
        ("prediction_step", user_loss),
        ("training_step", f"Do what follows a step in on_step_end of a TrainerCallback. {user_loss}"),
        ("_generate_single_turn _tool_call_loop _get_tool_suffix_ids", own_completions),
        *further,
    )


REFUSED_WITH_REWARDS = replace(
    REFUSED_IN_ROLLOUTS,
    never_called=_with_rollout(
        _POLICY_LOSS,
        _FOR_COMPLETIONS,
        ("_get_per_token_logps_and_entropies get_high_entropy_mask get_off_policy_mask get_gamma_weights",
         _POLICY_LOSS),
        ("_log_completion_extra _log_metric", _FOR_REWARDS),
    ),
    once_called={"_get_per_token_logps": _POLICY_LOSS},
    of_the_class=REFUSED_IN_ROLLOUTS.of_the_class
    | {"_calculate_rewards", "_generate_and_score_completions", "_generate", "_tokenize_prompts"},
)  # fmt: skip
REFUSED_WITH_TEACHER = replace(
    REFUSED_IN_ROLLOUTS,
    never_called=_with_rollout(
        _TEACHERS_LOSS,
        _FOR_SAMPLING,
        ("_get_last_hidden_state", _TEACHERS_LOSS),
        ("_generate _generate_and_score_completions", _FOR_SAMPLING),
        ("_tokenize_prompts", _FOR_TEXTS),
    ),
)


@dataclass(frozen=True)
class TrainerTraits:
    """How a trainer class differs from others in what it accepts from a script.

    refused: the names of TRL's that a script may not override, set or read.
    collators: what may be passed as `data_collator`.
    takes_transforms: whether the dataset may have a transform.
    reader, tokenizer_sides: as in `setup.TrainerSpec`.
    old_arguments: removed constructor arguments -> what to write today.
    idle_arguments: constructor arguments that are accepted as in TRL, but not used -> what to do instead.
    """

    refused: RefusedNames = REFUSED
    collators: AcceptedCollators = AcceptedCollators()
    takes_transforms: bool = False
    reader: type[ProcessorTokenizer] | None = PartsTokenizer
    tokenizer_sides: Mapping[str, str] | None = None
    old_arguments: Mapping[str, str] = field(default_factory=dict)
    idle_arguments: Mapping[str, str] = field(default_factory=dict)


class Absent:
    """An attribute of TRL's trainers that ours do not have until a script sets it. Reading it raises AttributeError,
    which says what to write instead."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type) -> Any:
        if trainer is None:
            return self
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self._name!r}. {_NEVER_THERE[self._name]}",
            name=self._name, obj=trainer,
        )  # fmt: skip


# Which names are a script's own.


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
    defined: dict[str, list[FunctionType]] = {}
    for kind in cls.__mro__:
        for name, value in vars(kind).items():
            function = inspect.unwrap(value) if isinstance(value, FunctionType | staticmethod) else None
            if function is not None and _package_of(function) != "trl_jax":
                defined.setdefault(name, []).append(function)
    functions = [] if passed is None else [passed]
    names = ["compute_loss", "_compute_loss"]
    while names:
        called = defined.pop(names.pop(0), [])
        functions += called
        names += [name for function in called for name in function.__code__.co_names if name in defined]
    return functions


def names_of_script(cls: type) -> frozenset[str]:
    """The names that user-defined subclasses of a trainer and their mixins define, and the names of functions that a
    script has assigned to a class of trl_jax."""
    defined = frozenset(name for kind in classes_of_script(cls) for name in vars(kind))
    return defined | {name for kind in cls.__mro__ for name, value in vars(kind).items() if _is_of_script(kind, value)}


def _is_of_script(kind: type, value: Any) -> bool:
    """Whether an attribute of a trl_jax class is a function from outside of trl_jax."""
    return _is_ours(kind) and isinstance(value, FunctionType) and _package_of(value) != "trl_jax"


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


# Checks of single methods.


OF_TORCH = (
    "create_optimizer may return torch's AdamW, Adam without weight decay, or SGD over the parameters of self.model, "
    "or an optax transformation. For groups with different learning rates in optax, use optax.multi_transform({'slow': "
    "optax.adamw(1e-5), 'fast': optax.adamw(1e-4)}, label), where label(params) maps each key of params to 'slow' or "
    "'fast'. To choose which parameters have weight decay, override get_decay_parameter_names."
)
OLD_COMPUTE_LOSS = (
    ", with which transformers calls it since 4.46, under TRL, too. Write compute_loss(self, model, inputs, "
    "return_outputs=False, num_items_in_batch=None), and divide a sum over tokens by it unless it is None."
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
    of_class = next((vars(kind)["generate"] for kind in type(model).__mro__ if "generate" in vars(kind)), None)
    was_set = vars(model).get("generate")
    while isinstance(was_set, partial) and not was_set.args and not was_set.keywords:
        was_set = was_set.func
    if was_set is not None and (of_class is None or was_set != MethodType(of_class, model)):
        return True
    libraries = "peft", "torch", "transformers", "trl_jax"
    while isinstance(of_class, FunctionType):  # a decorator and what it wraps may be of different packages
        if _package_of(of_class) not in libraries:
            return True
        of_class = vars(of_class).get("__wrapped__")
    return False


def check_compute_loss(cls: type, head: str) -> None:
    """Raise TypeError if the `compute_loss` of a language model does not take `num_items_in_batch`."""
    parameters = inspect.signature(cls.compute_loss).parameters
    takes = "num_items_in_batch" in parameters or any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    if head == "lm" and not takes:
        raise TypeError(f"{cls.__name__}.compute_loss takes no num_items_in_batch{OLD_COMPUTE_LOSS}")
