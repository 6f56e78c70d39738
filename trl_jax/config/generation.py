"""Arguments of online trainers, declared once: sampling, generation batches, rewards and logging of completions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

from trl_jax.config import devices, rules
from trl_jax.config.arguments import arg, redeclared
from trl_jax.config.base import inherited
from trl_jax.config.rules import as_dict, must_be
from trl_jax.config.shared import LanguageModelArguments

# ----------------------------------------------------------------------------------------------------
# Rules


# Keys of generation_kwargs: fields of transformers' GenerationConfig that affect how a single completion is generated.
GENERATION_KEYS = frozenset(
    """
    max_new_tokens do_sample temperature top_h top_k top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty
    encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids min_length min_new_tokens
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens sequence_bias eos_token_id pad_token_id bos_token_id renormalize_logits use_cache
    stop_strings num_beams length_penalty early_stopping
    """.split()
)
# With vllm_mode="server", parameters of vLLM's /v1/completions, whatever the engine.
SERVER_KEYS = frozenset(
    """
    temperature top_p top_k min_p repetition_penalty frequency_penalty presence_penalty max_tokens min_tokens stop
    stop_token_ids stop_strings include_stop_str_in_output ignore_eos logit_bias allowed_token_ids bad_words
    structured_outputs
    """.split()
)
_IDLE = {"num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1}  # no effect with these values
_NOTHING = object()
# Unsupported keys -> what TRL does with them, and what to use instead.
_INSTEAD = {
    "num_return_sequences": "TRL fails in the first step. Leave it out; GRPO and RLOO have num_generations.",
}
_NATIVE_GENERATOR = "completions come from trl_jax's own generator"
_ORDER_OF_PROMPTS = "shuffle_dataset and seed determine the order of prompts."


def generation_kwargs(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := rules.a_dict(name, value, values):
        return problem
    kwargs, keys = as_dict(name, value), SERVER_KEYS if uses_server(values) else GENERATION_KEYS
    strings = kwargs.get("stop_strings")
    if strings is not None and not _are_texts(strings):
        return f"{name} has stop_strings={strings!r}. It must be a string or a list of strings, none of them empty."
    if strings is not None and "stop" in kwargs:
        return f"{name} has both stop_strings and stop, which mean the same to a server. Leave one of them out."
    unknown = [key for key in kwargs if key not in keys and kwargs[key] != _IDLE.get(key, _NOTHING)]
    if not unknown:
        return None
    advice = "" if uses_server(values) else " ".join(_INSTEAD[key] for key in unknown if key in _INSTEAD)
    supported = f"supported: {', '.join(sorted(keys))}."
    return f"{name} has the keys {unknown}, which are not {rules.HERE}{f'. {advice}' if advice else f'; {supported}'}"


def _are_texts(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list | tuple) and all(isinstance(text, str) and text for text in texts) and bool(texts)


def uses_server(values: Mapping[str, Any]) -> bool:
    """Whether completions come from servers. OnlineConfig, for user-defined trainers, has no such arguments."""
    return bool(values.get("use_vllm")) and values.get("vllm_mode") == "server"


def _note_native_generator(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if not value or uses_server(values):
        return None
    return (
        f"{name}={value!r}: {_NATIVE_GENERATOR}, in this process. No vLLM server is contacted, and vLLM's options have "
        "no effect. For completions by a server, set vllm_mode='server'."
    )


def _regex(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value is None or (uses_server(values) and isinstance(value, str)):
        return None
    return (
        f"{name}={value!r} is not {rules.HERE} without vllm_mode='server': trl_jax's own generator cannot constrain "
        "completions to a pattern; leave it out."
    )


def _device_completions_rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value is not None and uses_server(values):
        return (
            f"{name}={value!r} has no effect with vllm_mode='server', where the server schedules completions (vLLM's "
            "--max-num-seqs). Leave it out."
        )
    return rules.whole(1, optional=True, most=rules.MOST_EXAMPLES)(name, value, values)


def above(least: float, most: float, optional: bool = False) -> rules.Rule:
    """A number above `least` and at most `most`."""

    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        if problem := rules.number(least, optional, most=most)(name, value, values):
            return problem
        return must_be(name, f"a number above {least:g}", value) if value == least else None

    return rule


def reward_weights(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    """A list of numbers, or None."""
    if value is None or (
        isinstance(value, list | tuple) and all(isinstance(part, Real) and math.isfinite(part) for part in value)
    ):
        return None
    return must_be(name, "a list of numbers, one for each reward function", value)


def _no_sequence_axis(trainer: str, rule: rules.Rule, read: Callable[[Any], Any]) -> rules.Rule:
    """`rule`, extended to reject a mesh that splits texts over devices, with TRL's message for `trainer`."""

    def refusal(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        if problem := rule(name, value, values):
            return problem
        parallel = read(value)
        if parallel is None or parallel.sizes.get("sequence", 1) == 1:
            return None
        algorithm = trainer.removesuffix("Trainer")
        return (
            f"{trainer} does not support sequence-dim parallelism (`parallelism_config.cp_size > 1` or "
            f"`parallelism_config.sp_size > 1`) yet. {algorithm} builds model inputs after generation inside the "
            f"trainer. Set both `cp_size=1` and `sp_size=1`, or leave the axis sequence out of {name}."
        )

    return refusal


def parallelism_config(trainer: str) -> Any:
    return inherited(
        "parallelism_config",
        rule=_no_sequence_axis(trainer, devices.parallelism_config, devices.parse_parallelism_config),
    )


def mesh_shape(trainer: str) -> Any:
    return inherited("mesh_shape", rule=_no_sequence_axis(trainer, devices.mesh_shape, devices.parse_mesh_shape))


def auto_find_batch_size(algorithm: str) -> Any:
    """The field with a rule that rejects it, with TRL's message."""

    def rule(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
        if not value:
            return None
        return (
            f"auto_find_batch_size is not supported by {algorithm}, because the generation batch must contain full "
            "prompt groups of num_generations completions, and reducing the batch size on out-of-memory breaks this "
            "invariant. Set auto_find_batch_size=False and lower per_device_train_batch_size instead."
        )

    return inherited("auto_find_batch_size", rule=rule)


# ----------------------------------------------------------------------------------------------------
# Declarations


@dataclass
class OnlineArguments(LanguageModelArguments):
    """Arguments of GRPOConfig, RLOOConfig and DistillationConfig, which list them at TRL's positions:
    `online("temperature")`."""

    learning_rate: float = inherited("learning_rate", default=1e-6, help="Peak learning rate.")
    train_sampling_strategy: str = inherited("train_sampling_strategy", how="warned", why=_ORDER_OF_PROMPTS)
    data_seed: int | None = inherited("data_seed", how="warned", why=_ORDER_OF_PROMPTS)
    dataloader_drop_last: bool = inherited(
        "dataloader_drop_last", how="silent", why="prompts that do not fill a generation are always left out"
    )
    remove_unused_columns: bool | None = inherited(
        "remove_unused_columns",
        default=False,
        help="Keep only the prompts: reward functions then receive no other columns.",
        how="native",
    )
    max_completion_length: int | None = arg(
        512, help="Maximum number of tokens in a completion.", rule=rules.whole(1, most=rules.MOST_STEPS)
    )
    shuffle_dataset: bool | None = arg(True, help="Shuffle the prompts, with seed.")
    chat_template_kwargs: dict | str | None = arg(
        None, help="Arguments for the chat template, as a dict or JSON.", rule=rules.template_arguments
    )

    # Sampling. As in TRL, None means the value of the model's generation_config, or else transformers' default.
    temperature: float = arg(
        1.0,
        help="Sampling temperature. The loss divides logits by it as well.",
        rule=above(0, 2.0**62),
    )
    top_p: float = arg(
        1.0,
        help="Sample only from the most likely tokens whose probabilities add up to this.",
        rule=rules.number(0, optional=True, most=1.0),
    )
    top_k: int = arg(
        0,
        help="Sample only from this many of the most likely tokens; 0 (or -1, as in vLLM) samples from all.",
        rule=rules.whole(-1, optional=True, most=2**31 - 1),
    )
    min_p: float | None = arg(
        None,
        help="Sample only from tokens that are at least this fraction as likely as the most likely one.",
        rule=rules.number(0, optional=True, most=1.0),
    )
    generation_kwargs: dict | str | None = arg(
        None,
        help="Other fields of transformers' GenerationConfig, as a dict or JSON; they override the other arguments.",
        rule=generation_kwargs,
    )
    repetition_penalty: float = arg(
        1.0,
        help="Values above 1.0 make tokens that already occurred less likely.",
        rule=above(0, rules.MOST_FLOAT32, optional=True),
    )
    cache_implementation: str | None = arg(
        None, help="Accepted without effect.", how="warned", why=f"{_NATIVE_GENERATOR}, which has one kind of cache."
    )
    ds3_gather_for_generation: bool = arg(
        True,
        help="Accepted without effect.",
        how="warned",
        why=f"{_NATIVE_GENERATOR}, which gathers one layer at a time.",
    )
    use_vllm: bool = arg(
        False,
        help="With vllm_mode='server', completions come from vLLM or SGLang servers; otherwise from trl_jax's own "
        "generator.",
        note=_note_native_generator,
    )
    vllm_mode: str = arg(
        "colocate",
        help="'server': completions come from the servers of vllm_server_base_url, or of vllm_server_host and "
        "vllm_server_port. 'colocate': from trl_jax's own generator.",
        rule=rules.one_of("server", "colocate"),
    )
    vllm_model_impl: str = arg("vllm", help="A vLLM option, without effect.", how="silent", why=_NATIVE_GENERATOR)
    vllm_enable_sleep_mode: bool = arg(
        False, help="A vLLM option, without effect.", how="silent", why=_NATIVE_GENERATOR
    )
    vllm_structured_outputs_regex: str | None = arg(
        None, help="Pattern that completions must match, with vllm_mode='server'.", rule=_regex
    )
    vllm_server_base_url: str | None = arg(
        None,
        help="URL of the vLLM or SGLang server, or of several, separated by commas, which share the prompts. If unset, "
        "vllm_server_host and vllm_server_port.",
        rule=rules.text(optional=True),
    )
    vllm_server_host: str = arg("0.0.0.0", help="Host of the server.", rule=rules.text())
    vllm_server_port: int = arg(8000, help="Port of the server.", rule=rules.whole(1, most=65535))
    vllm_server_timeout: float = arg(240.0, help="Seconds to wait for the server to start.", rule=above(0, math.inf))
    vllm_server_restart_timeout: float | None = arg(
        None,
        help="Seconds to wait for a server that stops answering during training, before the run ends. Raise it if "
        "servers are restarted automatically and take longer to start. If unset, 45, or vllm_server_timeout if that "
        "is less.",
        rule=above(0, math.inf, optional=True),
        kw_only=True,
    )
    vllm_weights_dir: str | None = arg(
        None,
        help="Folder in which weights are handed to the servers, which must see it under the same path. If unset, "
        "/dev/shm, for servers on this machine.",
        rule=rules.path,
        kw_only=True,
    )
    max_completions_per_device: int | None = arg(
        None,
        help="Maximum number of completions that a device generates at once. The others start when earlier ones end: "
        "the tokens are the same, and the cache is smaller. If unset, as many as fit into the device's memory.",
        rule=_device_completions_rule,
        kw_only=True,
    )
    vllm_group_port: int = arg(51216, help="A vLLM option, without effect.", how="silent", why=_NATIVE_GENERATOR)
    vllm_gpu_memory_utilization: float = arg(
        0.3, help="A vLLM option, without effect.", how="silent", why=_NATIVE_GENERATOR
    )
    vllm_max_model_length: int | None = arg(
        None, help="A vLLM option, without effect.", how="silent", why=_NATIVE_GENERATOR
    )
    vllm_tensor_parallel_size: int = arg(1, help="A vLLM option, without effect.", how="silent", why=_NATIVE_GENERATOR)

    # Logging of completions
    max_tool_calling_iterations: int | None = arg(
        None,
        help="Maximum number of turns that call tools; 0 calls none. If unset, no limit.",
        rule=rules.whole(0, optional=True),
    )
    log_completions: bool = arg(False, help="Print completions in a table and save them in output_dir/completions.")
    num_completions_to_print: int | None = arg(
        None, help="Number of completions to print. If unset, all.", rule=rules.whole(0, optional=True)
    )
    log_unique_prompts: bool = arg(False, help="Log each prompt only once in the tables of trackers.")


@dataclass
class RewardedArguments(OnlineArguments):
    """Arguments of online trainers whose completions get rewards."""

    num_generations: int | None = arg(
        8, help="Number of completions per prompt.", rule=rules.whole(1, most=rules.MOST_EXAMPLES)
    )
    num_generations_eval: int | None = arg(
        None,
        help="Number of completions per prompt in evaluation. If unset, num_generations.",
        rule=rules.whole(1, optional=True, most=rules.MOST_EXAMPLES),
    )
    generation_batch_size: int | None = arg(
        None,
        help="Number of completions generated at once, over all devices. Cannot be combined with steps_per_generation.",
        rule=rules.whole(1, optional=True, most=rules.MOST_EXAMPLES),
    )
    steps_per_generation: int | None = arg(
        None,
        help="Number of micro-batches that the completions of a generation are split into. If unset, "
        "gradient_accumulation_steps.",
        rule=rules.whole(1, optional=True, most=rules.MOST_MICRO_BATCHES),
    )
    num_iterations: int = arg(
        1,
        help="Number of times that each generation is trained on (mu in the GRPO paper).",
        rule=rules.whole(1, most=rules.MOST_MICRO_BATCHES),
    )
    beta: float = arg(
        0.0,
        help="Weight of the KL penalty against the reference model; 0.0 uses no reference model.",
        rule=rules.number(0, most=rules.MOST_FLOAT32),
    )
    epsilon: float = arg(
        0.2,
        help="Lower clip range: the policy ratio is clipped at 1 - epsilon.",
        rule=rules.number(0, most=rules.MOST_FLOAT32),
    )
    epsilon_high: float | None = arg(
        None,
        help="Upper clip range: the policy ratio is clipped at 1 + epsilon_high (at epsilon_high itself "
        "in 'cispo'). If unset, epsilon.",
        rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32),
    )
    mask_truncated_completions: bool = arg(
        False, help="Exclude completions that were cut off at max_completion_length from the loss."
    )
    reward_weights: list[float] | None = arg(
        None, help="Weight of each reward function. If unset, 1.0 each.", rule=reward_weights
    )
    reward_timeout: float | None = arg(
        None,
        help="Maximum seconds that an asynchronous reward function may take. If unset, no limit.",
        rule=above(0, math.inf, optional=True),
        kw_only=True,
    )
    log_multimodal: bool = arg(True, help="With log_completions, whether trackers get the images of prompts.")
    use_transformers_continuous_batching: bool = arg(
        False,
        help="Accepted, but completions always come from trl_jax's own generator.",
        how="mapped",
        why=f"{_NATIVE_GENERATOR}.",
    )
    transformers_continuous_batching_config: dict | str | None = arg(
        None, help="Accepted without effect.", how="silent", why=_NATIVE_GENERATOR, rule=rules.a_dict
    )
    use_transformers_paged: bool = arg(
        False, help="Deprecated: use use_transformers_continuous_batching.", how="silent", why=_NATIVE_GENERATOR
    )


def online(name: str, **changes: Any) -> Any:
    """The field `name` of `RewardedArguments`; `changes` as in `redeclared`."""
    field = RewardedArguments.__dataclass_fields__[name]
    return redeclared(field, field.metadata["help"].handling, **changes)


# ----------------------------------------------------------------------------------------------------
# Arguments that depend on each other


def generation_sizes(
    generation_batch_size: int | None, steps_per_generation: int | None, *, global_batch_size: int, accumulation: int
) -> tuple[int, int]:
    """generation_batch_size and steps_per_generation, given at most one of them.

    Args:
        global_batch_size: completions in a micro-batch, over all devices.
        accumulation: micro-batches in a step.

    Raises:
        ValueError: both are set, or the completions do not fill whole micro-batches.
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
    """Raise ValueError, with TRL's message, if a batch would split the completions of a prompt.

    Args:
        eval_batch_size: (completions per device in an evaluation batch, number of devices); None without evaluation.
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


class GenerationArguments(Protocol):
    """The arguments whose values depend on each other."""

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


def warn_about_deprecated(args: GenerationArguments, stacklevel: int) -> None:
    """Warn about deprecated arguments, and set their replacements.

    Args:
        stacklevel: of the line that creates the config, relative to the caller of this function.
    """
    if args.max_prompt_length is not None:
        text = (
            f"max_prompt_length={args.max_prompt_length} is deprecated, and TRL no longer has it. It still keeps the "
            f"last {args.max_prompt_length} tokens of longer prompts. Leave it out to keep prompts whole."
        )
        warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)
    if args.use_transformers_paged:
        text = (
            "`use_transformers_paged` is deprecated and will be removed in v2.0.0. Use "
            "`use_transformers_continuous_batching` instead."
        )
        warnings.warn(text, FutureWarning, stacklevel=stacklevel + 1)
        args.use_transformers_continuous_batching = True


def resolve_sizes(algorithm: str, args: GenerationArguments) -> None:
    """Set whichever of generation_batch_size and steps_per_generation is unset. Starts JAX, to count devices.

    Raises:
        ValueError: the sizes do not fit, or a batch would split the completions of a prompt.
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
