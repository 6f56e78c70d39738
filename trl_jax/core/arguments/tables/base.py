"""How each field of BaseConfig is handled, and those that most trainers have; a trainer's own table extends these."""

from __future__ import annotations

import operator

from trl_jax.core.arguments import device_rules, optimizer_rules, parallel, rules
from trl_jax.core.arguments.optimizers import OPTIMIZERS
from trl_jax.core.arguments.table import Handling, fields

AS_BF16 = "float16 is run as bfloat16, which needs no loss scaling. Pass the bf16 argument to say so."

# Arguments that choose by name -> the names that this release has.
SUPPORTED: dict[str, tuple[str, ...]] = {
    "optim": tuple(OPTIMIZERS),
    "lr_scheduler_type": tuple(optimizer_rules.SCHEDULES),
    "train_sampling_strategy": ("random", "sequential", "group_by_length"),
}

BASE: dict[str, Handling] = {
    # Output, duration, batches
    **fields("output_dir", "native"),
    **fields("max_steps", "native", rule=rules.bounded(rules.MOST_STEPS)),
    **fields("num_train_epochs", "native", rule=rules.epochs),
    **fields("per_device_train_batch_size per_device_eval_batch_size", "mapped",
              rule=rules.whole(1, most=rules.MOST_EXAMPLES)),
    **fields("gradient_accumulation_steps", "native", rule=rules.accumulation),
    **fields("auto_find_batch_size", "native"),
    # Optimiser, schedule and order of rows
    **fields("optim", "native", rule=optimizer_rules.optimizer, note=optimizer_rules.optimizer_note),
    **fields("optim_args", "native", rule=optimizer_rules.optimizer_args),
    **fields("lr_scheduler_type", "native", rule=optimizer_rules.scheduler),
    **fields("train_sampling_strategy", "native", rule=rules.one_of(*SUPPORTED["train_sampling_strategy"])),
    **fields("learning_rate weight_decay adam_epsilon", "native", rule=rules.number(0, most=rules.MOST_FLOAT32)),
    **fields("adam_beta1 adam_beta2", "native", rule=optimizer_rules.beta),
    **fields("max_grad_norm", "native", rule=rules.number(-rules.MOST_FLOAT32, optional=True)),
    **fields("warmup_steps", "native", rule=rules.bounded(rules.MOST_STEPS)),
    **fields("optim_target_modules", "refused", "it belongs to GaLore and APOLLO; leave it out."),
    **fields("lr_scheduler_kwargs", "native", rule=optimizer_rules.scheduler_kwargs),
    **fields("average_tokens_across_devices", "silent", "a loss divides by the whole step's examples or tokens"),
    **fields("label_smoothing_factor", "warned", "this loss has no labels to smooth."),
    **fields("neftune_noise_alpha", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    # Precision, memory, compilation
    **fields("bf16", "native"),
    **fields("fp16 fp16_full_eval", "mapped", AS_BF16),
    **fields("bf16_full_eval tf32 use_cpu activation_checkpointing gradient_checkpointing", "mapped"),
    **fields("activation_checkpointing_kwargs gradient_checkpointing_kwargs", "mapped",
              rule=device_rules.checkpointing_kwargs),
    **fields("torch_compile", "silent", "every step is compiled"),
    **fields("torch_compile_backend torch_compile_mode", "warned", "XLA compiles every step."),
    **fields("use_liger_kernel liger_kernel_config", "warned", "XLA brings the kernels; results are equal."),
    **fields("use_cache", "native"),
    **fields("torch_empty_cache_steps", "warned", "JAX manages its own memory."),
    # Logging and tracking
    **fields("logging_strategy logging_first_step log_level log_level_replica", "native"),
    **fields("logging_steps save_steps eval_delay", "native", rule=rules.bounded()),
    **fields("eval_steps", "native", rule=rules.bounded(optional=True)),
    **fields("disable_tqdm report_to run_name project", "native"),
    **fields("trackio_space_id trackio_bucket_id trackio_static_space_id", "native"),
    **fields("log_on_each_node", "silent", "one process logs"),
    **fields("logging_nan_inf_filter", "silent", "a NaN is always logged as it is"),
    **fields("include_num_input_tokens_seen", "native", rule=rules.tokens_seen),
    # Evaluation
    **fields("eval_strategy eval_on_start prediction_loss_only", "native"),
    **fields("eval_use_gather_object eval_accumulation_steps", "silent", "each batch goes to the host"),
    **fields("eval_do_concat_batches batch_eval_metrics", "native"),
    **fields("include_for_metrics", "native", rule=rules.metric_inputs),
    # Saving, the Hub, resuming
    **fields("save_strategy", "native"),
    **fields("load_best_model_at_end metric_for_best_model greater_is_better", "native"),
    **fields("save_total_limit", "native", rule=rules.whole(-1, optional=True)),
    **fields("save_only_model", "native"),
    **fields("save_on_each_node", "silent", "one process saves"),
    **fields("enable_jit_checkpoint", "silent", "SIGTERM always saves before the run ends"),
    **fields("push_to_hub hub_token hub_model_id hub_private_repo", "native"),
    **fields("hub_strategy hub_always_push hub_revision", "native"),
    **fields("ignore_data_skip restore_callback_states_from_checkpoint", "native"),
    **fields("resume_from_checkpoint", "native"),  # as in TRL, a script hands it to train()
    # Reproducibility
    **fields("seed", "native", rule=rules.whole(0, most=2**32 - 1)),
    **fields("data_seed", "native", rule=rules.whole(-(2**63), optional=True, most=2**64 - 1)),  # as torch takes it
    **fields("full_determinism", "mapped", rule=device_rules.deterministic),
    # Data
    **fields("dataloader_drop_last", "native"),
    **fields("remove_unused_columns", "silent", "the loader takes the columns it needs and leaves the others"),
    **fields("length_column_name", "native"),
    **fields("dataloader_pin_memory dataloader_persistent_workers", "silent", "there are no worker processes"),
    **fields("dataloader_num_workers dataloader_prefetch_factor dataloader_multiprocessing_context", "warned",
              "batches are made in this process, ahead of the step."),
    **fields("dataloader_in_order", "warned", "batches always come in order."),
    **fields("label_names", "warned", "this trainer's batches have no columns of labels."),
    # Devices and launchers
    **fields("accelerator_config", "mapped", rule=device_rules.accelerator),
    **fields("parallelism_config", "mapped", rule=parallel.parallelism_config),
    **fields("fsdp", "mapped", rule=parallel.fsdp, is_off=operator.not_),
    **fields("fsdp_config", "mapped"),
    **fields("deepspeed", "mapped", rule=parallel.deepspeed, note=parallel.deepspeed_note, is_off=operator.not_),
    **fields("ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph ddp_timeout", "silent",
              "collectives are XLA's"),
    **fields("ddp_bucket_cap_mb ddp_backend", "warned", "collectives are XLA's."),
    **fields("local_rank do_train do_eval do_predict", "silent", "scripts read it, the trainer does not"),
    **fields("debug", "mapped", rule=rules.debug_words, note=rules.debug_note),
    **fields("skip_memory_metrics", "mapped"),
    # Shared by all trainers of TRL
    **fields("model_init_kwargs", "native", rule=rules.a_dict),
    **fields("trust_remote_code", "native"),
    # Not in TRL
    **fields("batch_layout", "mapped", rule=rules.one_of("auto", "padded", "packed", "shared")),
    **fields("remat_policy", "mapped",
              rule=rules.one_of("auto", "nothing_saveable", "dots_with_no_batch_dims_saveable")),
    **fields("mesh_shape", "mapped", rule=parallel.mesh_shape),
    **fields("coordinator_address", "native"),
    **fields("num_processes", "native", rule=rules.whole(1, optional=True)),
    **fields("process_id", "native", rule=rules.whole(0, optional=True)),
}  # fmt: skip

# Of the arguments that BaseConfig has no field for, since each trainer of TRL's has them at other places.
COMMON: dict[str, Handling] = {
    **fields("disable_dropout eos_token pad_token", "native"),
    **fields("chat_template_path", "native", rule=rules.path),
    **fields("dataset_num_proc", "native", rule=rules.whole(0, optional=True, most=rules.MOST_PROCESSES)),
    **fields("max_length", "native", rule=rules.whole(1, optional=True)),
    **fields("pad_to_multiple_of", "mapped", rule=rules.pad_multiple),
    **fields("activation_offloading", "mapped", rule=device_rules.offloading),
}
