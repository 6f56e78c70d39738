"""RLOOConfig."""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

from transformers.training_args import ParallelismConfig

from trl_jax.config import generation, rules
from trl_jax.config.arguments import arg
from trl_jax.config.base import BaseConfig
from trl_jax.config.generation import auto_find_batch_size, mesh_shape, online, parallelism_config
from trl_jax.config.rules import must_be, show


def _range(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value is None:
        return None
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(end, Real) for end in value):
        least, most = value
        if least <= most:
            return None
    old = " Up to TRL 0.21, a single number had an effect only with normalize_reward. Leave it out."
    problem = must_be(name, "two numbers in ascending order, such as (-10.0, 10.0), or None", value)
    return problem + (old if isinstance(value, Real) else "")


def _without_weights(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := rules.number(0, optional=True, most=rules.MOST_FLOAT32)(name, value, values):
        return problem
    if value is None or values["reward_weights"] is None:
        return None
    return (
        f"{show(name, value)} cannot be combined with reward_weights, because the penalty is another reward function. "
        "Write it as one, with its own weight, and leave missing_eos_penalty out."
    )


@dataclass(repr=False)
class RLOOConfig(BaseConfig):
    """The arguments of RLOOTrainer, in TRL's names, defaults and positional order; our own come last."""

    _argument_group_name = "training"
    max_length: ClassVar[None] = None  # prompts are not truncated; completions have max_completion_length
    dataset_num_proc: ClassVar[None] = None
    _VALID_DICT_FIELDS = BaseConfig._VALID_DICT_FIELDS + [
        "transformers_continuous_batching_config", "generation_kwargs", "chat_template_kwargs",
    ]  # fmt: skip

    learning_rate: float = online("learning_rate")
    train_sampling_strategy: str = online("train_sampling_strategy")
    data_seed: int | None = online("data_seed")
    dataloader_drop_last: bool = online("dataloader_drop_last")
    parallelism_config: ParallelismConfig | None = parallelism_config("RLOOTrainer")
    mesh_shape: str | None = mesh_shape("RLOOTrainer")
    auto_find_batch_size: bool = auto_find_batch_size("RLOO")

    router_aux_loss_coef: float | None = online("router_aux_loss_coef")
    disable_dropout: bool = online("disable_dropout", default=False)

    remove_unused_columns: bool | None = online("remove_unused_columns")
    num_generations: int | None = online("num_generations", default=2)
    num_generations_eval: int | None = online("num_generations_eval")
    max_completion_length: int | None = online("max_completion_length")
    ds3_gather_for_generation: bool = online("ds3_gather_for_generation")
    shuffle_dataset: bool | None = online("shuffle_dataset")
    pad_to_multiple_of: int | str | None = online("pad_to_multiple_of")

    generation_batch_size: int | None = online("generation_batch_size")
    steps_per_generation: int | None = online("steps_per_generation")
    temperature: float = online("temperature")
    top_p: float = online("top_p")
    top_k: int = online("top_k")
    min_p: float | None = online("min_p")
    generation_kwargs: dict | str | None = online("generation_kwargs")
    chat_template_kwargs: dict | str | None = online("chat_template_kwargs")
    repetition_penalty: float = online("repetition_penalty")
    cache_implementation: str | None = online("cache_implementation")

    use_vllm: bool = online("use_vllm")
    vllm_mode: str = online("vllm_mode")
    vllm_model_impl: str = online("vllm_model_impl")
    vllm_enable_sleep_mode: bool = online("vllm_enable_sleep_mode")
    vllm_structured_outputs_regex: str | None = online("vllm_structured_outputs_regex")
    vllm_server_base_url: str | None = online("vllm_server_base_url")
    vllm_server_host: str = online("vllm_server_host")
    vllm_server_port: int = online("vllm_server_port")
    vllm_server_timeout: float = online("vllm_server_timeout")
    vllm_group_port: int = online("vllm_group_port")
    vllm_gpu_memory_utilization: float = online("vllm_gpu_memory_utilization")
    vllm_max_model_length: int | None = online("vllm_max_model_length")
    vllm_tensor_parallel_size: int = online("vllm_tensor_parallel_size")

    beta: float = online(
        "beta",
        default=0.05,
        help="Weight of the KL penalty against the reference model, which is subtracted from the rewards; "
        "0.0 uses no reference model.",
    )
    num_iterations: int = online("num_iterations")
    epsilon: float = online("epsilon")
    epsilon_high: float | None = online("epsilon_high")
    reward_weights: list[float] | None = online("reward_weights")
    normalize_advantages: bool = arg(
        False, help="Subtract the mean of all advantages and divide by their standard deviation."
    )
    reward_clip_range: tuple[float, float] | None = arg(
        None,
        help="Lower and upper bound of a completion's weighted reward, such as -10.0 10.0. If unset, no bounds.",
        rule=_range,
    )
    mask_truncated_completions: bool = online("mask_truncated_completions")
    sync_ref_model: bool = online("sync_ref_model")
    ref_model_mixup_alpha: float = online("ref_model_mixup_alpha")
    ref_model_sync_steps: int = online("ref_model_sync_steps")

    log_completions: bool = online("log_completions")
    log_multimodal: bool = online("log_multimodal")
    num_completions_to_print: int | None = online("num_completions_to_print")
    log_unique_prompts: bool = online("log_unique_prompts")

    use_transformers_continuous_batching: bool = online("use_transformers_continuous_batching")
    transformers_continuous_batching_config: dict | str | None = online("transformers_continuous_batching_config")

    use_transformers_paged: bool = online("use_transformers_paged")

    max_prompt_length: int | None = online("max_prompt_length")
    chat_template_path: str | None = online("chat_template_path", kw_only=True)
    vllm_server_restart_timeout: float | None = online("vllm_server_restart_timeout", kw_only=True)
    vllm_weights_dir: str | None = online("vllm_weights_dir", kw_only=True)
    max_completions_per_device: int | None = online("max_completions_per_device", kw_only=True)
    reward_timeout: float | None = online("reward_timeout")

    # Arguments of TRL up to 0.21.
    missing_eos_penalty: float | None = arg(
        None,
        help="Deprecated: amount subtracted from the reward of a completion without EOS. If unset, nothing.",
        rule=_without_weights,
        kw_only=True,
    )
    total_episodes: int | None = arg(
        None,
        help="Deprecated: total number of completions to generate; max_steps is computed from it.",
        rule=rules.whole(1, optional=True, most=rules.MOST_STEPS),
        kw_only=True,
    )
    reward_model_path: str | None = arg(
        None,
        help="Deprecated: for scripts that load a reward model from it; the trainer does not read it.",
        how="silent",
        kw_only=True,
    )
    sft_model_path: str | None = arg(
        None,
        help="Deprecated: for scripts that load the policy from it; the trainer does not read it.",
        how="silent",
        kw_only=True,
    )
    sanity_check: bool = arg(
        False,
        help="Deprecated: for scripts that then use few rows; the trainer does not read it.",
        how="silent",
        kw_only=True,
    )

    def __post_init__(self):
        generation.warn_about_deprecated(self, self._frames_to_caller())
        super().__post_init__()
        if self.missing_eos_penalty is not None or self.total_episodes is not None:
            from trl_jax.legacy.arguments import warn

            warn(self, self._frames_to_caller())
        if self.counts_devices:
            self.resolve_sizes()

    def resolve_sizes(self) -> None:
        generation.resolve_sizes("RLOO", self)
        if self.total_episodes is not None:
            from trl_jax.legacy.arguments import resolve_steps

            resolve_steps(self)
