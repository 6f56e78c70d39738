"""Old names of arguments, and their translation."""

from __future__ import annotations

import difflib
import inspect
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trl_jax.config.rules import array_error
from trl_jax.core.secrets import shown
from trl_jax.core.text import hide_frames

# ----------------------------------------------------------------------------------------------------
# The metaclass of config classes, which accepts old names


class OldNames(type):
    """Metaclass of config classes: translates old names with a warning, and suggests a name for an unknown one.

    Raises:
        TypeError: at construction, for a name that is neither an argument nor the old name of one.
        ValueError: at construction, for an array.
    """

    def __call__(cls, *args, **kwargs):
        try:
            accepted = inspect.signature(cls.__init__).parameters
            # The __init__ of a user-defined subclass may take **kwargs and pass them on.
            open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
            kwargs, environment, notes = translate_old_names(kwargs, accepted)
            for name in kwargs.keys() - accepted.keys() if not open_ended else ():
                raise TypeError(f"{cls.__name__} has no argument {name!r}: {way_out(name, accepted)}")
            for name, value in (*zip([*accepted][1:], args, strict=False), *kwargs.items()):
                if isinstance(value, np.ndarray):  # comparing it gives an array, so rules cannot read it
                    raise ValueError(array_error(name, value))
            os.environ.update(environment)
            for note in notes:
                warnings.warn(note, FutureWarning, stacklevel=2)
            return super().__call__(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise


# ----------------------------------------------------------------------------------------------------
# Old names that scripts still use, and their translation


GONE = (
    "fp16_backend half_precision_backend include_tokens_per_second ipex jit_mode_eval overwrite_output_dir"
    " past_index ray_scope save_safetensors torchdynamo tpu_num_cores use_ipex use_mps_device"
)
GONE_FROM_TRL = (
    "chars_per_token dataset_batch_size infinite num_of_sequences"  # of SFTTrainer, SFTConfig
    " label_pad_token_id padding_value"  # of DPOConfig, KTOConfig
    " vllm_device vllm_dtype vllm_enable_prefix_caching"  # of GRPOConfig
)
# Arguments of old TRL releases without a direct replacement. False and None had no effect.
NO_REPLACEMENT = {
    "force_use_ref_model": "leave it out: a ref_model is also used with an adapter.",
    "generate_during_eval": "leave it out, and generate with the saved model.",
    "is_encoder_decoder": "leave it out: only decoder-only language models are supported.",
    "max_completion_length": "use max_length, which limits prompt and completion together.",
    "max_prompt_length": "use max_length, which limits prompt and completion together.",
    "model_adapter_name": "leave it out: the model's adapter is trained.",
    "ref_adapter_name": "leave it out: the reference is a copy of the adapter that is passed in.",
    "non_eos_penalty": "use missing_eos_penalty, which is subtracted from the score instead of replacing it.",
    "normalize_reward": "normalize in the reward function, or use normalize_advantages, which acts after the baseline.",
    "reference_free": "leave it out: every loss uses the reference.",
    "ref_model_init_kwargs": "load the reference with AutoModelForCausalLM.from_pretrained, and pass it as ref_model.",
    "rpo_alpha": "use loss_type=['sigmoid', 'sft'] and loss_weights=[1.0, rpo_alpha].",
    "truncation_mode": "leave it out: this trainer has only one way to truncate texts.",
}
# Old names of arguments of GRPOConfig and RLOOConfig.
OF_GENERATION = {
    "cliprange": "epsilon",
    "exp_name": "run_name",
    "kl_coef": "beta",
    "normalize_advantage": "normalize_advantages",
    "num_ppo_epochs": "num_iterations",
    "response_length": "max_completion_length",
    "rloo_k": "num_generations",
    "use_liger_loss": "use_liger_kernel",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "wandb_log_unique_prompts": "log_unique_prompts",
}
# Arguments of TRL's RLOOConfig up to 0.21 that have no effect.
IDLE_OF_GENERATION = {
    "local_rollout_forward_batch_size": "leave it out: the generator chooses batches that fit into memory.",
    "num_sample_generations": "leave it out: log_completions=True shows completions.",
    "penalty_reward_value": "leave it out: it belongs to non_eos_penalty.",
    "stop_token": "leave it out: the EOS token ends a completion.",
    "token_level_kl": "leave it out: the advantage contains the sum over tokens either way.",
    "whiten_rewards": "leave it out: RLOOTrainer never read it.",
}
RENAMED = {
    "dispatch_batches": "leave it out: one process makes the batches.",
    "evaluation_strategy": "use eval_strategy.",
    "group_by_length": "use train_sampling_strategy.",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR.",
    "max_seq_length": "use max_length.",
    "no_cuda": "use use_cpu.",
    "num_mini_batches": "use steps_per_generation=num_mini_batches * gradient_accumulation_steps.",
    "push_to_hub_model_id": "use hub_model_id.",
    "push_to_hub_organization": "use hub_model_id, as organization/name.",
    "push_to_hub_token": "use hub_token.",
    "split_batches": "leave it out: one process makes the batches.",
    "stop_token_id": "use generation_kwargs={'eos_token_id': ...}.",
    "torch_dtype": "use dtype.",
    "use_liger": "use use_liger_kernel.",
    "warmup_ratio": "use warmup_steps: a number below 1 is a ratio.",
    **{old: f"use {new}." for old, new in OF_GENERATION.items()},
    **IDLE_OF_GENERATION,
    **NO_REPLACEMENT,
    **dict.fromkeys(GONE.split(), "leave it out: transformers no longer has it."),
    **dict.fromkeys(GONE_FROM_TRL.split(), "leave it out: TRL no longer has it."),
}
# Old name -> the new one that takes the same value.
_SAME = {
    "evaluation_strategy": "eval_strategy",
    "max_seq_length": "max_length",
    "no_cuda": "use_cpu",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "torch_dtype": "dtype",
    "use_liger": "use_liger_kernel",
    "warmup_ratio": "warmup_steps",
    **OF_GENERATION,
}
# Argument -> {old value: current value}
OLD_VALUES = {"optim": {"adamw_apex_fused": "adamw_torch_fused", "adamw_hf": "adamw_torch"}}
_IGNORED = {*GONE.split(), *GONE_FROM_TRL.split(), *IDLE_OF_GENERATION, "dispatch_batches", "split_batches"}
TENSORBOARD = "TENSORBOARD_LOGGING_DIR"


def way_out(name: str, names: Iterable[str]) -> str:
    """A sentence about what to use instead of the unknown name."""
    if name in RENAMED:
        return RENAMED[name]
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]}?" if close else "no argument has a similar name."


def current_name(name: str) -> str | None:
    """The current name of an argument whose old name is `name`, if it takes the same values; else None."""
    return None if name == "warmup_ratio" else _SAME.get(name)  # warmup_steps may be a number of steps


def translate_old_names(kwargs: Mapping, names: Iterable[str]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Translate old names and values of keyword arguments.

    Args:
        kwargs: name -> value, as passed by the user.
        names: current names.

    Returns:
        The arguments by current names, environment variables to set, and a warning for each old name and value.

    Raises:
        TypeError: an argument is given by its old and its new name, or has no direct replacement.
    """
    names, result, environment, notes = set(names), dict(kwargs), {}, []
    for name in [name for name in kwargs if name in RENAMED and name not in names]:
        new = _translate_one(name, result.pop(name), kwargs)
        if new is None:
            continue
        if name in NO_REPLACEMENT:
            notes.append(f"{name}={kwargs[name]} has no effect: TRL no longer has it. Leave it out.")
            continue
        if name in _IGNORED:
            notes.append(f"{name} no longer has an effect; {RENAMED[name]}")
            continue
        notes.append(f"{name} is an old name: {RENAMED[name]}")
        environment |= {key: value for key, value in new.items() if key == TENSORBOARD}
        result |= {key: value for key, value in new.items() if key != TENSORBOARD}
    for name, values in OLD_VALUES.items():
        if isinstance(old := result.get(name), str) and old in values:
            result[name] = values[old]
            notes.append(f"{name}={old!r} is an old value: use {name}={result[name]!r}.")
    return result, environment, notes


def _translate_one(name: str, value: Any, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The argument by its current name; None if it has no effect."""
    if name == "save_safetensors" and value is False:
        raise TypeError("save_safetensors=False: weights are always saved as safetensors. Leave it out.")
    if name == "warmup_ratio" and "warmup_steps" in kwargs:  # steps took precedence, unless 0
        return None if float(kwargs["warmup_steps"] or 0) else {"warmup_steps": value}
    if name in _SAME:
        new = _SAME[name]
        if new in kwargs:
            raise TypeError(
                f"{shown(name, value)} and {shown(new, kwargs[new])} are the same argument. Leave {name} out."
            )
        return {new: value}
    if name == "logging_dir":
        return {} if value is None else {TENSORBOARD: str(value)}
    if name in ("num_mini_batches", "stop_token", "stop_token_id"):
        return _translate_old_rloo(name, value, kwargs)
    if name == "group_by_length":
        return {"train_sampling_strategy": "group_by_length"} if value else {}
    if name in NO_REPLACEMENT and value not in (None, False, {}):
        raise TypeError(f"{name}={value!r}: {RENAMED[name]}")
    if name == "push_to_hub_organization":
        model = kwargs.get("hub_model_id") or kwargs.get("push_to_hub_model_id")
        if value is None:
            return {}
        if model is None:
            raise TypeError("push_to_hub_organization requires a model name: use hub_model_id='organization/name'.")
        return {"hub_model_id": f"{value}/{model}"}
    return {}


def _translate_old_rloo(name: str, value: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Translate arguments of TRL's RLOOConfig up to 0.21 about mini-batches and stop tokens."""
    if name == "stop_token" and value not in (None, "eos"):
        raise TypeError(f"stop_token must be 'eos', got {value!r}. For other tokens, {RENAMED['stop_token_id']}")
    if value is None or name == "stop_token":
        return {}
    if name == "num_mini_batches":
        steps = int(value) * int(kwargs.get("gradient_accumulation_steps", 1))
        return {} if int(value) == 1 else {"steps_per_generation": steps}
    if "generation_kwargs" in kwargs:
        raise TypeError(f"stop_token_id={value!r} cannot be combined with generation_kwargs: {RENAMED[name]}")
    return {"generation_kwargs": {"eos_token_id": int(value)}}


RENAMED_IN_RLOO = {"config": "args", "policy": "model", "reward_model": "reward_funcs"}
# Arguments of RLOOTrainer up to TRL 0.21 -> what to use now.
OLD_RLOO_ARGUMENTS = {old: f"use {new}." for old, new in RENAMED_IN_RLOO.items()} | {
    "ref_policy": "it is the reference model. By default, that is the model before training.",
    "data_collator": "remove it: generation pads the prompts.",
}
