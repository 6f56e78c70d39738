"""The one table of arguments: what becomes of each field of RewardConfig in this release.

native: works as in TRL.  mapped: a JAX notion does it (a text, where there is one, is told when it is used).
silent: accepted, because nothing would change.  warned: accepted without effect, and said once.
refused: an error when away from its default.  A rule may refuse single values of any of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trl_jax.core import argument_rules as rules
from trl_jax.core import parallel
from trl_jax.core.argument_rules import HERE, Rule, show
from trl_jax.core.optimizers import OPTIMIZERS

Kind = Literal["native", "mapped", "silent", "warned", "refused"]


@dataclass(frozen=True)
class Fate:
    kind: Kind
    text: str = ""
    rule: Rule | None = None
    # What is told of a value that is accepted, where it depends on the value.
    note: Rule | None = None
    # True of values that mean the default though they are not equal to it.
    is_off: Callable[[Any], bool] | None = None


def _each(names: str, kind: Kind, text: str = "", **how: Any) -> dict[str, Fate]:
    return {name: Fate(kind, text, **how) for name in names.split()}


def _falsy(value: Any) -> bool:
    return not value


AS_BF16 = "float16 is run as bfloat16, which needs no loss scaling. Pass the bf16 argument to say so."

# The names that this release knows, of the arguments that choose by name.
SUPPORTED: dict[str, tuple[str, ...]] = {
    "optim": tuple(OPTIMIZERS),
    "lr_scheduler_type": tuple(rules.SCHEDULES),
    "train_sampling_strategy": ("random", "sequential", "group_by_length"),
}

TABLE: dict[str, Fate] = {
    # Output, duration, batches
    **_each("output_dir", "native"),
    **_each("max_steps", "native", rule=rules.bounded(rules.MOST_STEPS)),
    **_each("num_train_epochs", "native", rule=rules.epochs),
    **_each("per_device_train_batch_size per_device_eval_batch_size", "mapped",
            rule=rules.whole(1, most=rules.MOST_PAIRS)),
    **_each("gradient_accumulation_steps", "native", rule=rules.accumulation),
    **_each("auto_find_batch_size", "native"),
    # Optimiser, schedule and order of rows
    **_each("optim", "native", rule=rules.optimizer, note=rules.optimizer_note),
    **_each("optim_args", "native", rule=rules.optimizer_args),
    **_each("lr_scheduler_type", "native", rule=rules.scheduler),
    **_each("train_sampling_strategy", "native", rule=rules.one_of(*SUPPORTED["train_sampling_strategy"])),
    **_each("learning_rate weight_decay adam_epsilon", "native", rule=rules.number(0, most=rules.MOST_FLOAT32)),
    **_each("adam_beta1 adam_beta2", "native", rule=rules.beta),
    **_each("max_grad_norm", "native", rule=rules.number(0, optional=True)),
    **_each("warmup_steps", "native", rule=rules.bounded(rules.MOST_STEPS)),
    **_each("optim_target_modules", "refused", "it belongs to GaLore and APOLLO; leave it out."),
    **_each("lr_scheduler_kwargs", "native", rule=rules.scheduler_kwargs),
    **_each("average_tokens_across_devices", "silent", "the loss is a mean over pairs"),
    **_each("label_smoothing_factor", "warned", "preference pairs have no labels to smooth."),
    **_each("neftune_noise_alpha", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    # Precision, memory, compilation
    **_each("bf16", "native"),
    **_each("fp16 fp16_full_eval", "mapped", AS_BF16),
    **_each("bf16_full_eval tf32 use_cpu activation_checkpointing gradient_checkpointing", "mapped"),
    **_each("activation_checkpointing_kwargs gradient_checkpointing_kwargs", "mapped",
            rule=rules.checkpointing_kwargs),
    **_each("activation_offloading", "mapped", rule=rules.offloading),
    **_each("torch_compile", "silent", "every step is compiled"),
    **_each("torch_compile_backend torch_compile_mode", "warned", "XLA compiles every step."),
    **_each("use_liger_kernel liger_kernel_config", "warned", "XLA brings the kernels; results are equal."),
    **_each("use_cache", "silent", "a forward pass over whole rows keeps no cache"),
    **_each("torch_empty_cache_steps", "warned", "JAX manages its own memory."),
    # Logging and tracking
    **_each("logging_strategy logging_first_step log_level log_level_replica", "native"),
    **_each("logging_steps save_steps eval_steps eval_delay", "native", rule=rules.bounded()),
    **_each("disable_tqdm report_to run_name project", "native"),
    **_each("trackio_space_id trackio_bucket_id trackio_static_space_id", "native"),
    **_each("log_on_each_node", "silent", "one process logs"),
    **_each("logging_nan_inf_filter", "silent", "a NaN is always logged as it is"),
    **_each("include_num_input_tokens_seen", "native", rule=rules.tokens_seen),
    # Evaluation
    **_each("eval_strategy eval_on_start prediction_loss_only", "native"),
    **_each("eval_use_gather_object eval_accumulation_steps", "silent", "each batch goes to the host"),
    **_each("eval_do_concat_batches batch_eval_metrics", "native"),
    **_each("include_for_metrics", "native", rule=rules.metric_inputs),
    # Saving, the Hub, resuming
    **_each("save_strategy", "native"),
    **_each("load_best_model_at_end metric_for_best_model greater_is_better", "native"),
    **_each("save_total_limit", "native", rule=rules.bounded()),
    **_each("save_only_model", "native"),
    **_each("save_on_each_node", "silent", "one process saves"),
    **_each("enable_jit_checkpoint", "silent", "SIGTERM always saves before the run ends"),
    **_each("push_to_hub hub_token hub_model_id hub_private_repo", "native"),
    **_each("hub_strategy hub_always_push hub_revision", "native"),
    **_each("ignore_data_skip restore_callback_states_from_checkpoint", "native"),
    **_each("resume_from_checkpoint", "native"),  # as in TRL, a script hands it to train()
    # Reproducibility
    **_each("seed", "native", rule=rules.whole(0, most=2**32 - 1)),
    **_each("data_seed", "native", rule=rules.whole(-(2**63), optional=True, most=2**64 - 1)),  # as torch takes it
    **_each("full_determinism", "mapped", rule=rules.deterministic),
    # Data
    **_each("dataloader_drop_last", "native"),
    **_each("remove_unused_columns", "silent", "the loader takes the columns it needs and leaves the others"),
    **_each("length_column_name", "native"),
    **_each("dataloader_pin_memory dataloader_persistent_workers", "silent", "there are no worker processes"),
    **_each("dataloader_num_workers dataloader_prefetch_factor dataloader_multiprocessing_context", "warned",
            "batches are made in this process, ahead of the step."),
    **_each("dataloader_in_order", "warned", "batches always come in order."),
    **_each("label_names", "warned", "preference pairs have no labels."),
    # Devices and launchers
    **_each("accelerator_config", "mapped", rule=rules.accelerator),
    **_each("parallelism_config", "mapped", rule=parallel.parallelism_config),
    **_each("fsdp", "mapped", rule=parallel.fsdp, is_off=_falsy),
    **_each("fsdp_config", "mapped"),
    **_each("deepspeed", "mapped", rule=parallel.deepspeed, note=parallel.deepspeed_note, is_off=_falsy),
    **_each("coordinator_address", "native"),
    **_each("num_processes", "native", rule=rules.whole(1, optional=True)),
    **_each("process_id", "native", rule=rules.whole(0, optional=True)),
    **_each("mesh_shape", "mapped", rule=parallel.mesh_shape),
    **_each("ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph ddp_timeout", "silent",
            "collectives are XLA's"),
    **_each("ddp_bucket_cap_mb ddp_backend", "warned", "collectives are XLA's."),
    **_each("local_rank do_train do_eval do_predict", "silent", "scripts read it, the trainer does not"),
    **_each("debug", "mapped", rule=rules.debug_words, note=rules.debug_note),
    **_each("skip_memory_metrics", "mapped"),
    # RewardConfig's own
    **_each("model_init_kwargs", "native", rule=rules.a_dict),
    **_each("trust_remote_code chat_template_path disable_dropout eos_token", "native"),
    **_each("max_length", "native", rule=rules.whole(1, optional=True)),
    **_each("dataset_num_proc", "native", rule=rules.whole(0, optional=True, most=rules.MOST_PROCESSES)),
    **_each("pad_to_multiple_of", "mapped", rule=rules.pad_multiple),
    **_each("center_rewards_coefficient", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    **_each("pad_token", "native"),
    # Not in TRL
    **_each("eval_report eval_subset_column", "native"),
    **_each("remat_policy", "mapped",
            rule=rules.one_of("auto", "nothing_saveable", "dots_with_no_batch_dims_saveable")),
    **_each("batch_layout", "mapped", rule=rules.one_of("auto", "padded", "packed", "shared")),
}  # fmt: skip


def defaults_of(fields: Iterable[dataclasses.Field]) -> dict[str, Any]:
    """name -> default, for every field that has one."""
    made = {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
    plain = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    return plain | made


def judge(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What the table says to these values: (refusals, warnings), one line each.

    `values` holds every name of the table; names that are not in the table (a subclass's own) are left alone.
    `defaults` are this release's: a default that a subclass changed is as much a wish as a value passed.
    """
    refusals, warnings = [], []
    for name, fate in TABLE.items():
        value = values[name]
        if fate.rule is not None and (problem := fate.rule(name, value, values)):
            refusals.append(problem)
        elif _is_away(value, defaults[name], fate):
            if fate.kind == "refused":
                refusals.append(f"{show(name, value)} is not {HERE}: {fate.text}")
            elif fate.kind == "warned":
                warnings.append(f"{show(name, value)} has no effect in trl_jax: {fate.text}")
            elif fate.kind == "mapped" and fate.text:
                warnings.append(f"{show(name, value)}: {fate.text}")
            elif fate.note is not None and (told := fate.note(name, value, values)):
                warnings.append(told)
    return refusals, warnings


def _is_away(value: Any, default: Any, fate: Fate) -> bool:
    if fate.is_off is not None and fate.is_off(value):
        return False
    return value != default
