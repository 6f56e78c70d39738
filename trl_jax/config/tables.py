"""How each field of the configs is handled."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from numbers import Real
from typing import Any

from trl_jax.config import devices, optimizers, rules
from trl_jax.config.optimizers import OPTIMIZERS
from trl_jax.config.rules import Handling, as_dict, fields, show

# ----------------------------------------------------------------------------------------------------
# How many completions a generation has, and whether they are whole groups.


def generation_sizes(
    generation_batch_size: int | None, steps_per_generation: int | None, *, global_batch_size: int, accumulation: int
) -> tuple[int, int]:
    """(completions of a generation, micro-batches that they are divided into), of which one at most is set.

    Args:
        global_batch_size: completions of a micro-batch, over all devices.
        accumulation: micro-batches of a step.

    Raises:
        ValueError: both are set, or the completions do not make whole micro-batches.
    """
    if generation_batch_size is not None and steps_per_generation is not None:
        raise ValueError(
            "'generation_batch_size' and 'steps_per_generation' can not be both configured at the same time"
        )
    if generation_batch_size is None:
        steps = accumulation if steps_per_generation is None else steps_per_generation
        return global_batch_size * steps, steps
    if generation_batch_size % global_batch_size:
        raise ValueError(
            f"generation_batch_size ({generation_batch_size}) must be divisible by the global batch size "
            f"({global_batch_size})."
        )
    return generation_batch_size, generation_batch_size // global_batch_size


def check_groups(
    algorithm: str, *, generation_batch_size: int, num_generations: int, eval_batch_size: tuple[int, int] | None,
    num_generations_eval: int | None,
) -> None:  # fmt: skip
    """Raise ValueError, in TRL's words, where a batch would have a part of a prompt's completions.

    Args:
        eval_batch_size: completions of an evaluation's batch on a device, and devices; None without evaluation.
    """
    if eval_batch_size is not None:
        per_device, devices = eval_batch_size
        completions = num_generations_eval or num_generations
        if per_device * devices % completions:
            raise ValueError(
                f"The global eval batch size ({per_device} * {devices}) must be divisible by the number of generations "
                f"used for evaluation ({completions})."
            )
    if generation_batch_size % num_generations:
        raise ValueError(
            f"generation_batch_size ({generation_batch_size}) must be divisible by num_generations "
            f"({num_generations}). Raise per_device_train_batch_size, which counts completions, or "
            "gradient_accumulation_steps."
        )
    if num_generations < 2:
        raise ValueError(
            f"{algorithm} requires at least 2 generations per prompt to calculate the advantages. You provided "
            f"{num_generations}, which is less than the minimum required."
        )


# ----------------------------------------------------------------------------------------------------
# How each field of BaseConfig is handled, and those that most trainers have; a trainer's own table extends these.


AS_BF16 = "float16 is run as bfloat16, which needs no loss scaling. Pass the bf16 argument to say so."

# Arguments that choose by name -> the names that this release has.
SUPPORTED: dict[str, tuple[str, ...]] = {
    "optim": tuple(OPTIMIZERS),
    "lr_scheduler_type": tuple(optimizers.SCHEDULES),
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
    **fields("optim", "native", rule=optimizers.optimizer, note=optimizers.optimizer_note),
    **fields("optim_args", "native", rule=optimizers.optimizer_args),
    **fields("lr_scheduler_type", "native", rule=optimizers.scheduler),
    **fields("train_sampling_strategy", "native", rule=rules.one_of(*SUPPORTED["train_sampling_strategy"])),
    **fields("learning_rate weight_decay adam_epsilon", "native", rule=rules.number(0, most=rules.MOST_FLOAT32)),
    **fields("adam_beta1 adam_beta2", "native", rule=optimizers.beta),
    **fields("max_grad_norm", "native", rule=rules.number(-rules.MOST_FLOAT32, optional=True)),
    **fields("warmup_steps", "native", rule=rules.bounded(rules.MOST_STEPS)),
    **fields("optim_target_modules", "refused", "it belongs to GaLore and APOLLO; leave it out."),
    **fields("lr_scheduler_kwargs", "native", rule=optimizers.scheduler_kwargs),
    **fields("average_tokens_across_devices", "silent", "a loss divides by the whole step's examples or tokens"),
    **fields("label_smoothing_factor", "warned", "this loss has no labels to smooth."),
    **fields("neftune_noise_alpha", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    # Precision, memory, compilation
    **fields("bf16", "native"),
    **fields("fp16 fp16_full_eval", "mapped", AS_BF16),
    **fields("bf16_full_eval tf32 use_cpu activation_checkpointing gradient_checkpointing", "mapped"),
    **fields("activation_checkpointing_kwargs gradient_checkpointing_kwargs", "mapped",
              rule=devices.checkpointing_kwargs),
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
    **fields("full_determinism", "mapped", rule=devices.deterministic),
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
    **fields("accelerator_config", "mapped", rule=devices.accelerator),
    **fields("parallelism_config", "mapped", rule=devices.parallelism_config),
    **fields("fsdp", "mapped", rule=devices.fsdp, is_off=operator.not_),
    **fields("fsdp_config", "mapped"),
    **fields("deepspeed", "mapped", rule=devices.deepspeed, note=devices.deepspeed_note, is_off=operator.not_),
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
    **fields("mesh_shape", "mapped", rule=devices.mesh_shape),
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
    **fields("activation_offloading", "mapped", rule=devices.offloading),
}


# ----------------------------------------------------------------------------------------------------
# How each field of ORPOConfig and of CPOConfig is handled.


CPO_LOSSES = ("sigmoid", "hinge", "ipo", "simpo", "alphapo")


def _loss_type(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value == "kto_pair":
        return "Support for kto_pair has been removed in CPOTrainer. Please use KTOTrainer."
    return None if value in CPO_LOSSES else f"Unknown loss type: {value}. Should be one of {list(CPO_LOSSES)}"


def _unsmoothed(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if values["loss_type"] not in ("hinge", "ipo"):
        return None
    return f"label_smoothing={value} has no effect with loss_type={values['loss_type']!r}. Set it to 0.0."


REFERENCE_FREE: dict[str, Handling] = {
    **BASE,
    **{name: line for name, line in COMMON.items() if name not in ("eos_token", "pad_token", "activation_offloading")},
    **fields("label_names", "warned", "preference pairs have no column of labels."),
    **fields("label_smoothing_factor", "warned", "preference losses have no labels of tokens to smooth."),
    **fields("max_prompt_length", "native", rule=rules.whole(1, optional=True)),
}
ORPO: dict[str, Handling] = {
    **REFERENCE_FREE,
    **fields("beta", "native", rule=rules.number(1e-9, most=rules.MOST_FLOAT32)),
}
CPO: dict[str, Handling] = {
    **ORPO,
    **fields("loss_type", "native", rule=_loss_type),
    **fields("label_smoothing", "native", rule=rules.number(0, most=1.0), note=_unsmoothed),
    **fields("cpo_alpha", "native", rule=rules.number(0, most=rules.MOST_FLOAT32)),
    **fields("simpo_gamma", "native", rule=rules.number(-rules.MOST_FLOAT32, most=rules.MOST_FLOAT32)),
    **fields("alpha", "native", rule=rules.number(-rules.MOST_FLOAT32, most=rules.MOST_FLOAT32)),
}


# ----------------------------------------------------------------------------------------------------
# How each field of RewardConfig is handled.


REWARD: dict[str, Handling] = (
    BASE
    | COMMON
    | {
        **fields("center_rewards_coefficient", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
        **fields("label_smoothing_factor", "warned", "preference pairs have no labels to smooth."),
        **fields("label_names", "warned", "preference pairs have no labels."),
        # Not in TRL
        **fields("eval_report eval_subset_column", "native"),
    }
)


# ----------------------------------------------------------------------------------------------------
# How each field of SFTConfig is handled.


_DATASET_KEY = "skip_prepare_dataset"


def _sft_loss_type(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value in ("nll", "dft"):
        return None
    return f"Invalid `loss_type` {value} passed. Supported values are 'nll' and 'dft'."


def _truncation(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value in ("keep_start", "keep_end"):
        return None
    return f"Unsupported truncation mode: {value}, expected 'keep_start' or 'keep_end'"


def _dataset_kwargs(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    """Warns of keys that earlier releases of TRL had."""
    others = [key for key in as_dict(name, value) if key != _DATASET_KEY]
    return f"{name} holds {others}, which have no effect: it takes {_DATASET_KEY} only." if others else None


def _smoothing_note(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if values["loss_type"] != "dft":
        return None
    return f"{show(name, value)} has no effect with loss_type='dft', which has no smoothing. Leave one of them out."


def _checkpointing(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    """TRL's `selective` keeps the products of matrices, as remat_policy="dots_with_no_batch_dims_saveable" does."""
    if problem := rules.a_dict(name, value, values):
        return problem
    kwargs = as_dict(name, value)
    selective = kwargs.pop("selective", False)
    if not selective:
        return devices.checkpointing_kwargs(name, kwargs, values)
    if not (values["gradient_checkpointing"] or values["activation_checkpointing"]):
        return f"`{name}={{'selective': True}}` requires `gradient_checkpointing=True`."
    if kwargs.pop("use_reentrant", False):
        return (
            f"`{name}={{'selective': True}}` requires non-reentrant gradient checkpointing. Set `use_reentrant` to "
            "`False`, or leave it unset."
        )
    return devices.checkpointing_kwargs(name, kwargs, values)


SFT: dict[str, Handling] = {
    **BASE,
    **{name: line for name, line in COMMON.items() if name != "disable_dropout"},
    **fields("label_smoothing_factor", "native", rule=rules.number(0, most=1.0), note=_smoothing_note),
    **fields("label_names", "warned", "the column of labels is called labels."),
    **fields("average_tokens_across_devices", "native"),
    **fields("activation_checkpointing_kwargs gradient_checkpointing_kwargs", "mapped", rule=_checkpointing),
    **fields("router_aux_loss_coef", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    # Rows
    **fields("dataset_text_field shuffle_dataset completion_only_loss assistant_only_loss", "native"),
    **fields("dataset_kwargs", "native", rule=rules.a_dict, note=_dataset_kwargs),
    **fields("truncation_mode", "native", rule=_truncation),
    **fields("packing eval_packing", "native"),
    **fields("packing_strategy", "native", rule=rules.one_of("bfd", "bfd_split", "wrapped")),
    **fields("padding_free", "mapped"),
    # The loss
    **fields("loss_type", "native", rule=_sft_loss_type),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------
# How the fields are handled that the configs of trainers with a reference share: DPOConfig and KTOConfig.


def _synced(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value and values["precompute_ref_log_probs"]:
        return (
            "You cannot use `sync_ref_model=True` together with `precompute_ref_log_probs=True`: log-probabilities "
            "computed before training are those of a reference that stays as it is. Leave one of the two out."
        )
    return None


def mixup_alpha(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if isinstance(value, int | float) and 0 <= value <= 1:
        return None
    return f"{show(name, value)}: wanted the policy's share of the new reference, from 0.0 to 1.0."


WITH_REFERENCE: dict[str, Handling] = {
    **BASE,
    **{name: line for name, line in COMMON.items() if name not in ("eos_token", "pad_token")},
    **fields("label_smoothing_factor", "warned", "preference losses have no labels of tokens to smooth."),
    **fields("router_aux_loss_coef", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    **fields("max_prompt_length", "native", rule=rules.whole(1, optional=True)),
    **fields("precompute_ref_log_probs", "native"),
    **fields("precompute_ref_batch_size", "native", rule=rules.whole(1, optional=True, most=rules.MOST_EXAMPLES)),
    **fields("sync_ref_model", "native", rule=_synced),
    **fields("ref_model_mixup_alpha", "native", rule=mixup_alpha),
    **fields("ref_model_sync_steps", "native", rule=rules.whole(1)),
    **fields("beta", "native", rule=rules.number(1e-9, most=rules.MOST_FLOAT32)),
}


# Of ReferenceConfig. `beta` is a field of the configs that declare it.
REFERENCE: dict[str, Handling] = {name: line for name, line in WITH_REFERENCE.items() if name != "beta"} | fields(
    "truncation_mode", "native", rule=_truncation
)


# ----------------------------------------------------------------------------------------------------
# How each field of DPOConfig is handled.


DPO_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
_OF_ANY_DIVERGENCE = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
_WITHOUT_WEIGHTS = {"aot", "aot_unpaired"}


def losses_of(loss_type: Any) -> list[Any]:
    """The names in `loss_type`, of which a script may write a single one, or a tuple."""
    return [loss_type] if isinstance(loss_type, str) else list(loss_type)


def _losses(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if not isinstance(value, list | tuple | str) or not value:
        return f"{show(name, value)}: wanted the names of losses, as in loss_type=['sigmoid']."
    value = losses_of(value)
    for loss in value:
        if loss not in DPO_LOSSES:
            return f"Unknown loss type: {loss}. Should be one of {list(DPO_LOSSES)}"
    if "exo_pair" in value and not 0 < values["label_smoothing"] < 1:
        return (
            "Label smoothing must be greater than 0.0 when using 'exo_pair' loss, and below 1. The paper recommends a "
            "value of 1e-3."
        )
    if "robust" in value and values["label_smoothing"] == 0.5:
        return "loss_type='robust' divides by 1 - 2 * label_smoothing, and label_smoothing is 0.5. Lower it."
    return None


def _losses_note(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if "robust" in losses_of(value) and values["label_smoothing"] > 0.5:
        return (
            "The `label_smoothing` parameter should lie in [0.0, 0.5) for the 'robust' loss. You provided "
            f"{values['label_smoothing']}."
        )
    return None


def _weights(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(weight, int | float) for weight in value):
        return f"{show(name, value)}: wanted a list of numbers, one for each of loss_type."
    if len(value) != (count := len(losses_of(values["loss_type"]))):
        return (
            "`loss_weights` must have the same length as `loss_type` when combining multiple losses. Got "
            f"{len(value)} weights for {count} loss types."
        )
    return None


def _divergence(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value not in DIVERGENCES:
        return f"Unknown f_divergence_type: {value}. Should be one of {list(DIVERGENCES)}"
    if value != "reverse_kl" and not set(losses_of(values["loss_type"])) <= _OF_ANY_DIVERGENCE:
        return (
            f"`f_divergence_type={value!r}` is only supported for the following loss types: "
            f"{sorted(_OF_ANY_DIVERGENCE)}. You provided {losses_of(values['loss_type'])}."
        )
    return None


def _weighting(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value and _WITHOUT_WEIGHTS & set(losses_of(values["loss_type"])):
        return (
            "WPO-style weighting is not implemented for 'aot' or 'aot_unpaired' because they sort the pairs of a "
            "batch. Leave use_weighting out."
        )
    return None


DPO: dict[str, Handling] = {
    **WITH_REFERENCE,
    "pad_token": COMMON["pad_token"],
    **fields("label_names", "warned", "preference pairs have no column of labels."),
    **fields("label_smoothing_factor", "warned", "preference losses have label_smoothing."),
    # Rows
    **fields("truncation_mode", "native", rule=_truncation),
    **fields("padding_free", "warned", "it is temporarily unavailable in TRL; batch_layout='packed' has no padding."),
    # The loss
    **fields("loss_type", "native", rule=_losses, note=_losses_note),
    **fields("loss_weights", "native", rule=_weights),
    **fields("discopop_tau", "native", rule=rules.number(1e-9, most=rules.MOST_FLOAT32)),
    **fields("ld_alpha", "native", rule=rules.number(0, optional=True, most=1.0)),
    **fields("label_smoothing", "native", rule=rules.number(0, most=1.0)),
    **fields("f_divergence_type", "native", rule=_divergence),
    **fields("f_alpha_divergence_coef", "native", rule=rules.number(-rules.MOST_FLOAT32, most=rules.MOST_FLOAT32)),
    **fields("use_weighting", "native", rule=_weighting),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------
# How each field of KTOConfig is handled.


KTO_LOSSES = ("kto", "apo_zero_unpaired")

KTO: dict[str, Handling] = {
    **WITH_REFERENCE,
    **fields("label_names", "warned", "the column that says which answers are desirable is called 'label'."),
    **fields("loss_type", "native", rule=rules.one_of(*KTO_LOSSES)),
    **fields("desirable_weight undesirable_weight", "native", rule=rules.number(0, most=rules.MOST_FLOAT32)),
}


# ----------------------------------------------------------------------------------------------------
# How the fields are handled that the configs of trainers share which write their own completions: `WRITING` of all,
# and `GENERATION` of those that judge them, GRPOConfig and RLOOConfig.


# Keys of generation_kwargs: fields of transformers' GenerationConfig that say how one completion is sampled.
GENERATION_KEYS = frozenset(
    """
    max_new_tokens do_sample temperature top_h top_k top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty
    encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids min_length min_new_tokens
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens sequence_bias eos_token_id pad_token_id bos_token_id renormalize_logits use_cache
    """.split()
)
_IDLE = {"num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1}  # that ask for nothing with these values
_NOTHING = object()
_OWN_ENGINE = "completions are written by trl_jax's own generator"


def _generation_kwargs(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := rules.a_dict(name, value, values):
        return problem
    asked = as_dict(name, value)
    unknown = [key for key in asked if key not in GENERATION_KEYS and asked[key] != _IDLE.get(key, _NOTHING)]
    if not unknown:
        return None
    return f"{name} holds {unknown}, which are not {rules.HERE}: it takes {', '.join(sorted(GENERATION_KEYS))}."


def _above(least: float, most: float, optional: bool = False) -> rules.Rule:
    """Of a number above `least` and at most `most`."""

    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        if problem := rules.number(least, optional, most=most)(name, value, values):
            return problem
        return f"{show(name, value)}: wanted a number above {least:g}." if value == least else None

    return rule


def _reward_weights(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    """Of a list of numbers, or None."""
    if value is None or (
        isinstance(value, list | tuple) and all(isinstance(part, Real) and math.isfinite(part) for part in value)
    ):
        return None
    return f"{show(name, value)}: wanted a list of numbers, one for each function."


def without_sequence_axis(trainer: str) -> dict[str, Handling]:
    """The lines of arguments that would divide texts over devices, refused in TRL's words for `trainer`."""

    def refused(name: str) -> rules.Rule:
        base = BASE[name].rule
        read = {"parallelism_config": devices.of_config, "mesh_shape": devices.of_mesh_shape}[name]

        def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
            if problem := base(name, value, values):
                return problem
            found = read(value)
            if found is None or found.sizes.get("sequence", 1) == 1:
                return None
            algorithm = trainer.removesuffix("Trainer")
            return (
                f"{trainer} does not support sequence-dim parallelism (`parallelism_config.cp_size > 1` or "
                f"`parallelism_config.sp_size > 1`) yet. {algorithm} builds model inputs after generation inside the "
                f"trainer. Set both `cp_size=1` and `sp_size=1`, or leave the axis sequence out of {name}."
            )

        return rule

    names = ("parallelism_config", "mesh_shape")
    return {name: fields(name, "mapped", rule=refused(name))[name] for name in names}


def whole_groups_only(algorithm: str) -> dict[str, Handling]:
    """The line of auto_find_batch_size, refused in TRL's words."""

    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        if not value:
            return None
        return (
            f"auto_find_batch_size is not supported by {algorithm}, because the generation batch must contain full "
            "prompt groups of num_generations completions, and reducing the batch size on out-of-memory breaks this "
            "invariant. Set auto_find_batch_size=False and lower per_device_train_batch_size instead."
        )

    return fields("auto_find_batch_size", "native", rule=rule)


WRITING: dict[str, Handling] = {
    **BASE,
    **fields("disable_dropout", "native"),
    **{name: COMMON[name] for name in ("chat_template_path", "pad_to_multiple_of")},
    **fields("train_sampling_strategy", "warned", "prompts come in the order of shuffle_dataset and seed."),
    **fields("data_seed", "warned", "prompts come in the order of shuffle_dataset and seed.",
              rule=BASE["data_seed"].rule),
    **fields("dataloader_drop_last", "silent", "prompts that do not fill a generation are always left out"),
    **fields("remove_unused_columns", "native"),
    # Prompts and completions
    **fields("max_completion_length", "native", rule=rules.whole(1, most=rules.MOST_STEPS)),
    **fields("max_prompt_length", "native", rule=rules.whole(1, optional=True)),
    **fields("shuffle_dataset", "native"),
    **fields("chat_template_kwargs", "native", rule=rules.template_arguments),
    # Sampling
    # As in TRL, None is what the model's generation_config has, then transformers' own default.
    **fields("temperature", "native", rule=_above(0, 2.0**62)),
    **fields("repetition_penalty", "native", rule=_above(0, rules.MOST_FLOAT32, optional=True)),
    **fields("top_p", "native", rule=rules.number(0, optional=True, most=1.0)),
    **fields("top_k", "native", rule=rules.whole(-1, optional=True, most=2**31 - 1)),  # -1 is 0, as vLLM has it
    **fields("min_p", "native", rule=rules.number(0, optional=True, most=1.0)),
    **fields("generation_kwargs", "native", rule=_generation_kwargs),
    **fields("cache_implementation", "warned", f"{_OWN_ENGINE}, whose cache has one form."),
    **fields("ds3_gather_for_generation", "warned", f"{_OWN_ENGINE}, which gathers a layer at a time."),
    **fields("use_vllm", "mapped", f"{_OWN_ENGINE}, in this process; no server is asked, and what configures vLLM "
              "has no effect."),
    **fields("vllm_mode", "silent", _OWN_ENGINE, rule=rules.one_of("server", "colocate")),
    **fields("vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url vllm_server_host vllm_server_port "
              "vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length "
              "vllm_tensor_parallel_size", "silent", _OWN_ENGINE),
    **fields("vllm_structured_outputs_regex", "refused", "completions are not held to a pattern; leave it out."),
    # Completions that are shown
    **fields("log_completions log_unique_prompts", "native"),
    **fields("num_completions_to_print", "native", rule=rules.whole(0, optional=True)),
}  # fmt: skip
GENERATION: dict[str, Handling] = {
    **WRITING,
    **fields("router_aux_loss_coef", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    # Generations, and the steps that they are for
    **fields("num_generations", "native", rule=rules.whole(1, most=rules.MOST_EXAMPLES)),
    **fields("num_generations_eval", "native", rule=rules.whole(1, optional=True, most=rules.MOST_EXAMPLES)),
    **fields("generation_batch_size", "native", rule=rules.whole(1, optional=True, most=rules.MOST_EXAMPLES)),
    **fields("steps_per_generation", "native", rule=rules.whole(1, optional=True, most=rules.MOST_MICRO_BATCHES)),
    **fields("use_transformers_continuous_batching", "mapped", f"{_OWN_ENGINE}."),
    **fields("use_transformers_paged transformers_continuous_batching_config", "silent", _OWN_ENGINE),
    **fields("log_multimodal", "silent", "completions are texts"),
    **fields("mask_truncated_completions", "native"),
    # The loss and the reference
    **fields("reward_weights", "native", rule=_reward_weights),
    **fields("reward_timeout", "native", rule=_above(0, math.inf, optional=True)),
    **fields("beta epsilon", "native", rule=rules.number(0, most=rules.MOST_FLOAT32)),
    **fields("epsilon_high", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    **fields("num_iterations", "native", rule=rules.whole(1, most=rules.MOST_MICRO_BATCHES)),
    **fields("sync_ref_model", "native"),
    **fields("ref_model_mixup_alpha", "native", rule=mixup_alpha),
    **fields("ref_model_sync_steps", "native", rule=rules.whole(1)),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------
# How each field of OnlineConfig is handled: those of GENERATION that every online objective has.


_OF_TRLS_ONLINE_CONFIGS = {
    "epsilon", "epsilon_high", "cache_implementation", "ds3_gather_for_generation", "log_multimodal",
    "use_transformers_continuous_batching", "use_transformers_paged", "transformers_continuous_batching_config",
}  # fmt: skip
ONLINE: dict[str, Handling] = {
    **{
        name: line
        for name, line in GENERATION.items()
        if name not in _OF_TRLS_ONLINE_CONFIGS and not name.startswith(("vllm_", "use_vllm"))
    },
    **without_sequence_axis("OnlineTrainer"),
    **whole_groups_only("OnlineTrainer"),
    **fields("scale_rewards", "native", rule=rules.one_of("batch", "group", "none")),
}


# ----------------------------------------------------------------------------------------------------
# How each field of DistillationConfig is handled.


DISTILLATION: dict[str, Handling] = {
    **WRITING,
    **without_sequence_axis("DistillationTrainer"),
    **fields("max_prompt_length", "native", rule=rules.whole(1, optional=True)),
    **fields("teacher_model_name_or_path teacher_model_revision", "native"),
    **fields("teacher_model_init_kwargs", "native", rule=BASE["model_init_kwargs"].rule),
    **fields("beta", "native", rule=rules.number(0, most=1.0)),
    **fields("max_tool_calling_iterations", "native", rule=rules.whole(1, optional=True)),
}


# ----------------------------------------------------------------------------------------------------
# How each field of GRPOConfig is handled.


GRPO_LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
SAMPLER_CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def _named(known: tuple[str, ...], text: str) -> rules.Rule:
    """Of one of several names, refused in TRL's words."""

    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        return None if value in known else text.format(value)

    return rule


def _hub_repo(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value is None or values["log_completions"]:
        return None
    return (
        "log_completions_hub_repo is set, but log_completions is False. Enable log_completions to upload completions "
        "to the Hub, or unset log_completions_hub_repo."
    )


def _least_ratio(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := rules.number(0, optional=True)(name, value, values):
        return problem
    most = values["vllm_importance_sampling_clip_max"]
    if value is not None and most is not None and value >= most:
        return (
            f"vllm_importance_sampling_clip_min ({value}) must be less than vllm_importance_sampling_clip_max ({most})."
        )
    return None


def _correction(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value not in SAMPLER_CORRECTIONS:
        return (
            f"Unknown vLLM importance sampling level: {value}. Possible values are 'token_truncate', 'token_mask', "
            "'sequence_truncate', and 'sequence_mask'."
        )
    ends = (values["vllm_importance_sampling_clip_min"], values["vllm_importance_sampling_clip_max"])
    if values["vllm_importance_sampling_correction"] and value.endswith("truncate") and ends == (None, None):
        return (
            "At least one of `vllm_importance_sampling_clip_min` or `vllm_importance_sampling_clip_max` must be set "
            "when `vllm_importance_sampling_mode` is a `*_truncate` mode."
        )
    return None


_any_number = rules.number(-rules.MOST_FLOAT32, most=rules.MOST_FLOAT32)


def _least_entropy_coef(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := _any_number(name, value, values):
        return problem
    most = values["entropy_coef_max"]
    if not values["use_adaptive_entropy"] or _any_number("entropy_coef_max", most, values) or value <= most:
        return None
    return f"{show(name, value)} is above {show('entropy_coef_max', most)}: wanted at most that. Lower it."


GRPO: dict[str, Handling] = {
    **GENERATION,
    **without_sequence_axis("GRPOTrainer"),
    **whole_groups_only("GRPO"),
    **fields("cast_lm_head_to_fp32", "native"),
    **fields("max_tool_calling_iterations", "native", rule=rules.whole(1, optional=True)),
    # The loss
    **fields("loss_type", "native", rule=_named(
        GRPO_LOSSES, f"Unknown loss type: {{}}. Should be one of {list(GRPO_LOSSES)}"
    )),
    **fields("importance_sampling_level", "native", rule=_named(
        ("token", "sequence"),
        "Unknown importance sampling level: {}. Possible values are 'token' and 'sequence'.")),
    **fields("scale_rewards", "native", rule=_named(
        ("batch", "group", "none"),
        "Invalid value for scale_rewards: {}. Must be one of 'batch', 'group', or 'none'.")),
    **fields("multi_objective_aggregation", "native", rule=_named(
        ("sum_then_normalize", "normalize_then_sum"),
        "Invalid multi_objective_aggregation: {}. Must be 'sum_then_normalize' or 'normalize_then_sum'.")),
    **fields("delta", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    **fields("sapo_temperature_neg sapo_temperature_pos", "native",
              rule=rules.number(1e-9, most=rules.MOST_FLOAT32)),
    **fields("vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg", "native",
              rule=rules.number(0, most=rules.MOST_FLOAT32)),
    **fields("off_policy_mask_threshold", "native",
              rule=rules.number(-rules.MOST_FLOAT32, optional=True, most=rules.MOST_FLOAT32)),
    **fields("use_bias_correction_kl use_adaptive_entropy", "native"),
    **fields("top_entropy_quantile", "native", rule=rules.number(0, most=1.0)),
    **fields("entropy_coef entropy_coef_max entropy_target", "native", rule=_any_number),
    **fields("entropy_coef_min", "native", rule=_least_entropy_coef),
    **fields("entropy_coef_delta", "native", rule=rules.number(0, most=rules.MOST_FLOAT32)),
    # Of what samples, where that is vLLM
    **fields("vllm_importance_sampling_correction vllm_importance_sampling_cap", "mapped"),
    **fields("vllm_importance_sampling_mode", "mapped", rule=_correction),
    **fields("vllm_importance_sampling_clip_max", "mapped", rule=rules.number(0, optional=True)),
    **fields("vllm_importance_sampling_clip_min", "mapped", rule=_least_ratio),
    # Completions that are shown
    **fields("log_completions_hub_repo", "native", rule=_hub_repo),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------
# How each field of RLOOConfig is handled.


def _range(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value is None:
        return None
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(end, Real) for end in value):
        least, most = value
        if least <= most:
            return None
    old = " Up to TRL 0.21 a single number counted with normalize_reward alone: leave it out."
    wanted = f"{show(name, value)}: wanted two numbers, the lower one first, as in (-10.0, 10.0), or None."
    return wanted + (old if isinstance(value, Real) else "")


def _beside_weights(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := rules.number(0, optional=True)(name, value, values):
        return problem
    if value is None or values["reward_weights"] is None:
        return None
    return (
        f"{show(name, value)} beside reward_weights: the penalty is one reward function more. Write it, with a weight "
        "of its own, and leave missing_eos_penalty out."
    )


RLOO: dict[str, Handling] = {
    **GENERATION,
    **without_sequence_axis("RLOOTrainer"),
    **whole_groups_only("RLOO"),
    **fields("normalize_advantages", "native"),
    **fields("reward_clip_range", "native", rule=_range),
    # Of TRL up to 0.21
    **fields("missing_eos_penalty", "native", rule=_beside_weights),
    **fields("total_episodes", "native", rule=rules.whole(1, optional=True)),
    **fields("reward_model_path sft_model_path sanity_check", "silent"),
}
