"""How each field of BaseConfig is handled, and those that most trainers have; a trainer's own table extends these."""

from __future__ import annotations

import operator

from trl_jax.core.arguments import parallel, rules
from trl_jax.core.arguments.optimizers import OPTIMIZERS
from trl_jax.core.arguments.table import Handling, handled

AS_BF16 = "float16 is run as bfloat16, which needs no loss scaling. Pass the bf16 argument to say so."

# Arguments that choose by name -> the names that this release has.
SUPPORTED: dict[str, tuple[str, ...]] = {
    "optim": tuple(OPTIMIZERS),
    "lr_scheduler_type": tuple(rules.SCHEDULES),
    "train_sampling_strategy": ("random", "sequential", "group_by_length"),
}

BASE: dict[str, Handling] = {
    # Output, duration, batches
    **handled("output_dir", "native"),
    **handled("max_steps", "native", rule=rules.bounded(rules.MOST_STEPS)),
    **handled("num_train_epochs", "native", rule=rules.epochs),
    **handled("per_device_train_batch_size per_device_eval_batch_size", "mapped",
              rule=rules.whole(1, most=rules.MOST_EXAMPLES)),
    **handled("gradient_accumulation_steps", "native", rule=rules.accumulation),
    **handled("auto_find_batch_size", "native"),
    # Optimiser, schedule and order of rows
    **handled("optim", "native", rule=rules.optimizer, note=rules.optimizer_note),
    **handled("optim_args", "native", rule=rules.optimizer_args),
    **handled("lr_scheduler_type", "native", rule=rules.scheduler),
    **handled("train_sampling_strategy", "native", rule=rules.one_of(*SUPPORTED["train_sampling_strategy"])),
    **handled("learning_rate weight_decay adam_epsilon", "native", rule=rules.number(0, most=rules.MOST_FLOAT32)),
    **handled("adam_beta1 adam_beta2", "native", rule=rules.beta),
    **handled("max_grad_norm", "native", rule=rules.number(0, optional=True)),
    **handled("warmup_steps", "native", rule=rules.bounded(rules.MOST_STEPS)),
    **handled("optim_target_modules", "refused", "it belongs to GaLore and APOLLO; leave it out."),
    **handled("lr_scheduler_kwargs", "native", rule=rules.scheduler_kwargs),
    **handled("average_tokens_across_devices", "silent", "a loss divides by the whole step's examples or tokens"),
    **handled("label_smoothing_factor", "warned", "this loss has no labels to smooth."),
    **handled("neftune_noise_alpha", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    # Precision, memory, compilation
    **handled("bf16", "native"),
    **handled("fp16 fp16_full_eval", "mapped", AS_BF16),
    **handled("bf16_full_eval tf32 use_cpu activation_checkpointing gradient_checkpointing", "mapped"),
    **handled("activation_checkpointing_kwargs gradient_checkpointing_kwargs", "mapped",
              rule=rules.checkpointing_kwargs),
    **handled("torch_compile", "silent", "every step is compiled"),
    **handled("torch_compile_backend torch_compile_mode", "warned", "XLA compiles every step."),
    **handled("use_liger_kernel liger_kernel_config", "warned", "XLA brings the kernels; results are equal."),
    **handled("use_cache", "native"),
    **handled("torch_empty_cache_steps", "warned", "JAX manages its own memory."),
    # Logging and tracking
    **handled("logging_strategy logging_first_step log_level log_level_replica", "native"),
    **handled("logging_steps save_steps eval_steps eval_delay", "native", rule=rules.bounded()),
    **handled("disable_tqdm report_to run_name project", "native"),
    **handled("trackio_space_id trackio_bucket_id trackio_static_space_id", "native"),
    **handled("log_on_each_node", "silent", "one process logs"),
    **handled("logging_nan_inf_filter", "silent", "a NaN is always logged as it is"),
    **handled("include_num_input_tokens_seen", "native", rule=rules.tokens_seen),
    # Evaluation
    **handled("eval_strategy eval_on_start prediction_loss_only", "native"),
    **handled("eval_use_gather_object eval_accumulation_steps", "silent", "each batch goes to the host"),
    **handled("eval_do_concat_batches batch_eval_metrics", "native"),
    **handled("include_for_metrics", "native", rule=rules.metric_inputs),
    # Saving, the Hub, resuming
    **handled("save_strategy", "native"),
    **handled("load_best_model_at_end metric_for_best_model greater_is_better", "native"),
    **handled("save_total_limit", "native", rule=rules.bounded()),
    **handled("save_only_model", "native"),
    **handled("save_on_each_node", "silent", "one process saves"),
    **handled("enable_jit_checkpoint", "silent", "SIGTERM always saves before the run ends"),
    **handled("push_to_hub hub_token hub_model_id hub_private_repo", "native"),
    **handled("hub_strategy hub_always_push hub_revision", "native"),
    **handled("ignore_data_skip restore_callback_states_from_checkpoint", "native"),
    **handled("resume_from_checkpoint", "native"),  # as in TRL, a script hands it to train()
    # Reproducibility
    **handled("seed", "native", rule=rules.whole(0, most=2**32 - 1)),
    **handled("data_seed", "native", rule=rules.whole(-(2**63), optional=True, most=2**64 - 1)),  # as torch takes it
    **handled("full_determinism", "mapped", rule=rules.deterministic),
    # Data
    **handled("dataloader_drop_last", "native"),
    **handled("remove_unused_columns", "silent", "the loader takes the columns it needs and leaves the others"),
    **handled("length_column_name", "native"),
    **handled("dataloader_pin_memory dataloader_persistent_workers", "silent", "there are no worker processes"),
    **handled("dataloader_num_workers dataloader_prefetch_factor dataloader_multiprocessing_context", "warned",
              "batches are made in this process, ahead of the step."),
    **handled("dataloader_in_order", "warned", "batches always come in order."),
    **handled("label_names", "warned", "this trainer's batches have no columns of labels."),
    # Devices and launchers
    **handled("accelerator_config", "mapped", rule=rules.accelerator),
    **handled("parallelism_config", "mapped", rule=parallel.parallelism_config),
    **handled("fsdp", "mapped", rule=parallel.fsdp, is_off=operator.not_),
    **handled("fsdp_config", "mapped"),
    **handled("deepspeed", "mapped", rule=parallel.deepspeed, note=parallel.deepspeed_note, is_off=operator.not_),
    **handled("ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph ddp_timeout", "silent",
              "collectives are XLA's"),
    **handled("ddp_bucket_cap_mb ddp_backend", "warned", "collectives are XLA's."),
    **handled("local_rank do_train do_eval do_predict", "silent", "scripts read it, the trainer does not"),
    **handled("debug", "mapped", rule=rules.debug_words, note=rules.debug_note),
    **handled("skip_memory_metrics", "mapped"),
    # Shared by all trainers of TRL
    **handled("model_init_kwargs", "native", rule=rules.a_dict),
    **handled("trust_remote_code", "native"),
    # Not in TRL
    **handled("batch_layout", "mapped", rule=rules.one_of("auto", "padded", "packed", "shared")),
    **handled("remat_policy", "mapped",
              rule=rules.one_of("auto", "nothing_saveable", "dots_with_no_batch_dims_saveable")),
    **handled("mesh_shape", "mapped", rule=parallel.mesh_shape),
    **handled("coordinator_address", "native"),
    **handled("num_processes", "native", rule=rules.whole(1, optional=True)),
    **handled("process_id", "native", rule=rules.whole(0, optional=True)),
}  # fmt: skip

# Of the arguments that BaseConfig has no field for, since each trainer of TRL's has them at other places.
COMMON: dict[str, Handling] = {
    **handled("chat_template_path disable_dropout eos_token pad_token", "native"),
    **handled("dataset_num_proc", "native", rule=rules.whole(0, optional=True, most=rules.MOST_PROCESSES)),
    **handled("max_length", "native", rule=rules.whole(1, optional=True)),
    **handled("pad_to_multiple_of", "mapped", rule=rules.pad_multiple),
    **handled("activation_offloading", "mapped", rule=rules.offloading),
}
