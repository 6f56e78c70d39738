"""How the fields are handled that the configs of trainers share which write their own completions: `WRITING` of all,
and `GENERATION` of those that judge them, GRPOConfig and RLOOConfig."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from trl_jax.core.arguments import parallel, rules
from trl_jax.core.arguments.table import Handling, fields
from trl_jax.core.arguments.tables.base import BASE, COMMON
from trl_jax.core.arguments.tables.with_reference import mixup_alpha
from trl_jax.core.arguments.values import as_dict, show

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


def _weights(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
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
        read = {"parallelism_config": parallel.of_config, "mesh_shape": parallel.of_mesh_shape}[name]

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
    **fields("reward_weights", "native", rule=_weights),
    **fields("reward_timeout", "native", rule=_above(0, math.inf, optional=True)),
    **fields("beta epsilon", "native", rule=rules.number(0, most=rules.MOST_FLOAT32)),
    **fields("epsilon_high", "native", rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32)),
    **fields("num_iterations", "native", rule=rules.whole(1, most=rules.MOST_MICRO_BATCHES)),
    **fields("sync_ref_model", "native"),
    **fields("ref_model_mixup_alpha", "native", rule=mixup_alpha),
    **fields("ref_model_sync_steps", "native", rule=rules.whole(1)),
}  # fmt: skip
