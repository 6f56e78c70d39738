"""The arguments of online trainers: sampling, generation batches, rewards and logging of completions."""

from __future__ import annotations

import warnings
from dataclasses import field
from typing import Any, Protocol

from trl_jax.config.tables import check_groups, generation_sizes

_VLLM = "Of vLLM, without effect here."
_HELP = {
    "remove_unused_columns": "Keep the prompts alone, and no other columns.",
    "num_generations": "Completions of each prompt.",
    "num_generations_eval": "Completions of each prompt in evaluations. Unset, as num_generations.",
    "max_completion_length": "Most tokens of a completion.",
    "ds3_gather_for_generation": "Accepted without effect.",
    "shuffle_dataset": "Take the prompts in random order, by seed.",
    "generation_batch_size": "Completions that are written at once, on all devices; not with steps_per_generation.",
    "steps_per_generation": "Micro-batches that they are divided into. Unset, gradient_accumulation_steps.",
    "temperature": "Logits are divided by it, when tokens are sampled and in the loss.",
    "top_p": "Sample of the likeliest tokens that have this probability together.",
    "top_k": "Sample of so many of the likeliest tokens; 0 or, as vLLM has it, -1: of all.",
    "min_p": "Sample of tokens that have this share of the likeliest one's probability.",
    "generation_kwargs": "More fields of transformers' GenerationConfig, as a dict or JSON; they win.",
    "chat_template_kwargs": "Arguments of the chat template, as a dict or JSON.",
    "repetition_penalty": "Above 1.0, tokens that were there before are less likely.",
    "cache_implementation": "Accepted without effect.",
    "use_vllm": "Accepted: completions are written by trl_jax's own generator.",
    "vllm_structured_outputs_regex": "Not in this release.",
    "num_iterations": "Times that the completions of a generation are trained on.",
    "epsilon": "How far below 1 the ratio of new and old policy counts.",
    "epsilon_high": "How far above 1 it counts. Unset, as epsilon.",
    "mask_truncated_completions": "Leave completions out of the loss that were cut at max_completion_length.",
    "max_tool_calling_iterations": "Most turns in which tools are called. Unset, any number.",
    "log_completions": "Show completions in a table, and keep them.",
    "log_multimodal": "Accepted without effect.",
    "num_completions_to_print": "Completions in the table that is shown. Unset, all.",
    "log_unique_prompts": "Show a prompt once in the tables of trackers.",
    "use_transformers_continuous_batching": "Accepted: completions are written by trl_jax's own generator.",
    "transformers_continuous_batching_config": "Accepted without effect.",
    "use_transformers_paged": "Deprecated: use_transformers_continuous_batching.",
    **dict.fromkeys(
        "vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url vllm_server_host vllm_server_port "
        "vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length "
        "vllm_tensor_parallel_size".split(),
        _VLLM,
    ),
}


def shared(name: str, default: Any) -> Any:
    """The field `name`, with its help."""
    return field(default=default, metadata={"help": _HELP[name]})


def max_prompt_length() -> Any:
    text = "Deprecated: tokens of a prompt, of which the last ones stay. Unset, all."
    return field(default=None, kw_only=True, metadata={"help": text})


class GenerationArguments(Protocol):
    """The arguments that are settled together."""

    max_prompt_length: int | None
    use_transformers_paged: bool
    use_transformers_continuous_batching: bool
    generation_batch_size: int | None
    steps_per_generation: int | None
    num_generations: int
    num_generations_eval: int | None
    per_device_train_batch_size: int
    per_device_eval_batch_size: int
    gradient_accumulation_steps: int
    do_eval: bool
    eval_strategy: Any
    data_parallel_size: int


def warn_of_old(args: GenerationArguments, stacklevel: int) -> None:
    """Warn of deprecated arguments, and set those that took their place.

    Args:
        stacklevel: of the line that made the config, counted from the caller of this function.
    """
    if args.max_prompt_length is not None:
        text = (
            f"max_prompt_length={args.max_prompt_length} is deprecated, and TRL no longer has it: of longer prompts "
            f"the last {args.max_prompt_length} tokens stay, as it was. Leave it out to keep prompts whole."
        )
        warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)
    if args.use_transformers_paged:
        text = (
            "`use_transformers_paged` is deprecated and will be removed in v2.0.0. Use "
            "`use_transformers_continuous_batching` instead."
        )
        warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)
        args.use_transformers_continuous_batching = True


def settle_sizes(algorithm: str, args: GenerationArguments) -> None:
    """Set generation_batch_size and steps_per_generation by each other. JAX starts here: devices are counted.

    Raises:
        ValueError: they do not fit, or a batch would have a part of a prompt's completions.
    """
    devices = args.data_parallel_size
    args.generation_batch_size, args.steps_per_generation = generation_sizes(
        args.generation_batch_size,
        args.steps_per_generation,
        global_batch_size=args.per_device_train_batch_size * devices,
        accumulation=args.gradient_accumulation_steps,
    )
    evaluates = args.do_eval and args.eval_strategy != "no"
    check_groups(
        algorithm,
        generation_batch_size=args.generation_batch_size,
        num_generations=args.num_generations,
        eval_batch_size=(args.per_device_eval_batch_size, devices) if evaluates else None,
        num_generations_eval=args.num_generations_eval,
    )
