"""Lets the trainers of a test session share jitted functions if their steps are the same.

Each trainer jits its own step, which JAX traces, lowers and compiles: for tiny models that takes six times as long as
the training. Here two trainers share one jitted function if everything it is traced from is equal: the trainer's class,
the task, the graphs of the model and its reference, the optimizer, the shardings, and every argument that is not used
on the host only. Evaluations and the log-probabilities of completions and references are shared in the same way. A
trainer keeps its own step while a test patches something that could be traced, if the user brings a loss or an
optimizer, and under THOROUGH=1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from compat_tests.effort import THOROUGH

_MOST = 160  # jitted functions kept, with their programs

# Arguments that are not used in a traced step. An argument that is not listed here is part of the key.
HOST = frozenset("""
    output_dir run_name max_steps num_train_epochs seed data_seed logging_steps logging_strategy logging_first_step
    logging_nan_inf_filter save_steps save_strategy save_total_limit save_only_model save_on_each_node report_to
    disable_tqdm eval_steps eval_strategy eval_on_start eval_delay per_device_train_batch_size
    per_device_eval_batch_size gradient_accumulation_steps load_best_model_at_end metric_for_best_model
    greater_is_better push_to_hub hub_model_id hub_token hub_strategy hub_private_repo hub_always_push hub_revision
    ignore_data_skip dataloader_drop_last restore_callback_states_from_checkpoint pad_to_multiple_of
    train_sampling_strategy include_num_input_tokens_seen remove_unused_columns prediction_loss_only log_level
    lr_scheduler_type lr_scheduler_kwargs
""".split())  # fmt: skip
# Arguments that user-defined losses may read, but the package's losses do not: rows and layouts are made, and
# completions generated, before the step, and the learning rate is passed to it.
HOST_OF_OURS = HOST | frozenset("""
    learning_rate batch_layout dataset_num_proc dataset_text_field dataset_kwargs truncation_mode shuffle_dataset
    packing packing_strategy eval_packing completion_only_loss assistant_only_loss eos_token pad_token
    chat_template_path chat_template_kwargs max_prompt_length eval_report eval_subset_column precompute_ref_batch_size
    ref_model_sync_steps eval_do_concat_batches include_for_metrics batch_eval_metrics do_train do_eval do_predict
    num_generations num_generations_eval max_completion_length generation_batch_size steps_per_generation num_iterations
    top_p top_k min_p generation_kwargs repetition_penalty reward_weights scale_rewards multi_objective_aggregation
    reward_timeout log_completions num_completions_to_print log_unique_prompts resume_from_checkpoint
    dataloader_num_workers max_completions_per_device lmbda seq_kd teacher_model_name_or_path generate_ahead
    vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_server_restart_timeout
    vllm_weights_dir log_multimodal
""".split())  # fmt: skip
# Fields of a task that only affect how rows are made, or what is computed from rows on the host.
HOST_OF_TASK = frozenset(
    """
    row_options eval_packing padding_free max_length max_prompt_length truncation_mode num_generations
    num_generations_eval reward_weights cycle scale_rewards multi_objective_aggregation
""".split()
)
# Fields of a setup that are not traced, or that the key contains in another form.
HOST_OF_RUN = frozenset(
    """
    editable batch_size reference sharding_plan events progress vocab_size completions_loss features
""".split()
)
_TRACED = ("trl_jax", "jax", "flax", "optax", "numpy")
# Modules that run on the host only, or that generate: patching them changes no program that is shared here.
_HOST = (
    "trl_jax.generation", "trl_jax.rollout", "trl_jax.training.policy_generator", "trl_jax.training.server",
    "trl_jax.cli", "trl_jax.core.secrets", "trl_jax.data", "trl_jax.training.checkpoint_files", "trl_jax.training.data",
    "trl_jax.hub.fetch", "trl_jax.hub.push", "trl_jax.rewards", "trl_jax.training.metrics",
    "trl_jax.training.reference_logps", "trl_jax.training.checkpointer", "trl_jax.training.resume",
    "trl_jax.training.push", "trl_jax.training.logging", "trl_jax.scripts",
)  # fmt: skip

_shared: OrderedDict[Any, Any] = OrderedDict()
_alone: list[bool] = []  # not empty while nothing may be shared (a stack, for nested contexts)
_patches: weakref.WeakSet = weakref.WeakSet()
_default_optimizers: OrderedDict[int, Any] = OrderedDict()  # by id; keeping them alive prevents reuse of an id


def install() -> None:
    """Make trainers share jitted functions. A no-op under THOROUGH=1."""
    if THOROUGH:
        return
    from trl_jax.trainer import base_trainer
    from trl_jax.training import reference_logps as precompute
    from trl_jax.training import step as train_step
    from trl_jax.training import train
    from trl_jax.training.evaluate import CompletionEvaluator, Evaluator, LogitsEvaluation, WholeBatchEvaluation
    from trl_jax.training.rollout import CompletionLogps

    _after(pytest.MonkeyPatch, "__init__", lambda patch, _: _patches.add(patch))
    base_trainer.default_optimizer = _remembered(base_trainer.default_optimizer)
    train.optimizer_of = _remembered_with_tower(train.optimizer_of)
    _after(base_trainer.BaseTrainer, "__init__", _name_trainer)
    _after(Evaluator, "__init__", _share_evaluation)
    for name in ("_one_pass", "_two_passes"):
        _after(LogitsEvaluation, "__init__", _share_attribute(name))
    _after(WholeBatchEvaluation, "__init__", _share_attribute("_sums"))
    _after(CompletionEvaluator, "__init__", _share_attribute("sums"))
    _after(CompletionLogps, "__init__", _share_attribute("_logps"))
    train_step.TrainStep.compiled = _sharing(train_step.TrainStep.compiled)
    precompute._compiled = _sharing_precomputation(precompute._compiled)


@contextlib.contextmanager
def nothing_shared() -> Iterator[None]:
    """For tests that change the task of an existing trainer: a shared program closes over the first trainer's task."""
    _alone.append(True)
    try:
        yield
    finally:
        _alone.pop()


def _after(kind: type, name: str, then: Callable) -> None:
    """Make `kind.name` call `then(self, result)` after each call."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def wrapped(self, *given, **options):
        result = method(self, *given, **options)
        then(self, result)
        return result

    setattr(kind, name, wrapped)


def _remembered(default_optimizer: Callable) -> Callable:
    @functools.wraps(default_optimizer)
    def made(choice, backend, args, max_steps):
        optimizer = default_optimizer(choice, backend, args, max_steps)
        if choice.tx is None:
            warmup = args.get_warmup_steps(max_steps)
            _remember(optimizer, repr(dataclasses.replace(choice, peak=0.0)), warmup)
        return optimizer

    return made


def _remembered_with_tower(optimizer_of: Callable) -> Callable:
    """A default optimizer is wrapped if the model has a vision tower."""

    @functools.wraps(optimizer_of)
    def made(created, choice, max_grad_norm, masks, vision):
        optimizer = optimizer_of(created, choice, max_grad_norm, masks, vision)
        if id(created) in _default_optimizers and optimizer is not created and not masks:
            _remember(optimizer, *_default_optimizers[id(created)][1:], tuple(sorted(vision)))
        return optimizer

    return made


def _remember(optimizer: Any, *key: Any) -> None:
    _default_optimizers[id(optimizer)] = optimizer, *key
    if len(_default_optimizers) > 1000:
        _default_optimizers.popitem(last=False)


def _name_trainer(trainer: Any, _: None) -> None:
    trainer.parts.train_step.trainer = weakref.ref(trainer)


def _sharing(compiled: Callable) -> Callable:
    @functools.wraps(compiled)
    def shared(self, tx, *, remat):
        def make():
            return compiled(self, tx, remat=remat)

        trainer, optimizer = getattr(self, "trainer", lambda: None)(), _default_optimizers.get(id(tx))
        if trainer is None or optimizer is None or "loss" in vars(trainer):
            return make()
        kind, args = type(trainer), None
        if _package(kind) != "trl_jax":
            args = _said(self._setup.args, HOST)
        return _shared_or(make, self._setup, "step", kind, args, optimizer[1:], remat)

    return shared


def _sharing_precomputation(compiled: Callable) -> Callable:
    @functools.wraps(compiled)
    def shared(setup):
        made = _shared_or(lambda: compiled(setup).func, setup, "reference")
        return functools.partial(made, setup.arrays)

    return shared


def _share_evaluation(evaluator: Any, _: None) -> None:
    own = evaluator._outputs, evaluator._measure
    evaluator._outputs, evaluator._measure = _shared_or(lambda: own, evaluator._setup, "evaluation")


def _share_attribute(name: str) -> Callable:
    """A hook that shares the jitted function stored in attribute `name` of an object with a `_setup`."""

    def share(holder: Any, _: None) -> None:
        own = getattr(holder, name)
        setattr(holder, name, _shared_or(lambda: own, holder._setup, type(holder), name))

    return share


def _shared_or(make: Callable[[], Any], setup: Any, *more: Any) -> Any:
    """The function made earlier for an equal key, or `make()`."""
    key = _key(setup, *more)
    if key is None:
        return make()
    if key not in _shared:
        _shared[key] = make()
        if len(_shared) > _MOST:
            _shared.popitem(last=False)
    _shared.move_to_end(key)
    return _shared[key]


def _key(setup: Any, *more: Any) -> Any:
    """Everything that a program is traced from; None if that cannot be determined, or if something is patched."""
    if setup.model.trainable_masks or setup.batch_methods or _is_patched() or _alone:
        return None
    if setup.completions_loss is not None and "_logps" not in more:  # log-probabilities do not depend on the loss
        return None
    reference, backends = None, [setup.model.backend]
    if setup.reference is not None:
        reference = _of_backend(setup.reference.backend), _fields(setup.reference, {"backend", "config", "arrays"})
        backends.append(setup.reference.backend)
    windows = any(backend.traits.window is not None for backend in backends)  # then max_length is traced
    said = _said(setup.args, HOST_OF_OURS if windows else HOST_OF_OURS | {"max_length"}) + _said(
        setup.task, HOST_OF_TASK
    )
    if " at 0x" in said:
        return None
    kinds = type(setup.args), type(setup.task)
    places = _places(setup)
    key = (
        said,
        _of_backend(setup.model.backend),
        reference,
        places,
        _fields(setup, HOST_OF_RUN),
        setup.pad_to_multiple_of,
        kinds,
        more,
    )
    hash(key)  # if a field is unhashable, list it in `HOST_OF_RUN` or make it hashable
    return key


def _said(value: Any, without: frozenset[str]) -> str:
    """The fields of arguments or of a task as text; `without` are left out."""
    return repr(_fields(value, without)) if dataclasses.is_dataclass(value) else repr(value)


def _places(setup: Any) -> Any:
    """The sharding plan, and the shapes that it depends on; None on a single device."""
    plan = setup.sharding_plan
    if plan is None:
        return None
    axes = tuple(sorted(plan.axes.items()))
    shapes = (tuple(sorted((path, leaf.shape) for path, leaf in arrays.items()))
              for arrays in (setup.model.params, setup.frozen))  # fmt: skip
    return _fields(plan, {"axes"}), axes, *shapes


def _fields(value: Any, without: frozenset[str] | set[str]) -> tuple:
    return tuple((field.name, getattr(value, field.name)) for field in dataclasses.fields(value)
                 if field.name not in without)  # fmt: skip


def _of_backend(backend: Any) -> tuple:
    named = tuple(sorted(backend.tensors.items())), tuple(sorted(backend.undecayed))
    return type(backend), backend.graph, backend.traits.window, named


def _is_patched() -> bool:
    """Whether a test has patched something in a package that steps are traced from."""
    return any(
        any(target is not os.environ for target, *_ in patch._setitem)
        or any(_package(target) in _TRACED and not _on_the_host(target) for target, *_ in patch._setattr)
        for patch in _patches
    )


def _on_the_host(target: Any) -> bool:
    module = _module(target)  # trl_jax itself only has names
    return module == "trl_jax" or any(f"{module}.".startswith(f"{place}.") for place in _HOST)


def _package(target: Any) -> str:
    return _module(target).partition(".")[0]


def _module(target: Any) -> str:
    """The name of a module, or the module's name of a class or an object."""
    if isinstance(target, type) or not hasattr(target, "__name__"):
        target = target if isinstance(target, type) else type(target)
        return target.__module__
    return target.__name__
