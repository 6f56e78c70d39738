"""GRPOConfig."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers.training_args import ParallelismConfig

from trl_jax.config import generation, rules
from trl_jax.config.arguments import arg
from trl_jax.config.base import BaseConfig
from trl_jax.config.generation import auto_find_batch_size, mesh_shape, online, parallelism_config
from trl_jax.config.rules import must_be, show
from trl_jax.losses.names import GRPO_LOSSES, SAMPLER_CORRECTIONS


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
    return must_be(name, f"at most {show('entropy_coef_max', most)}", value)


@dataclass(repr=False)
class GRPOConfig(BaseConfig):
    """The arguments of GRPOTrainer, in TRL's names, defaults and positional order; our own come last."""

    _argument_group_name = "training"
    max_length: ClassVar[None] = None  # prompts are not cut, completions have a limit of their own
    dataset_num_proc: ClassVar[None] = None
    _VALID_DICT_FIELDS = BaseConfig._VALID_DICT_FIELDS + [
        "transformers_continuous_batching_config", "generation_kwargs", "chat_template_kwargs",
    ]  # fmt: skip

    learning_rate: float = online("learning_rate")
    train_sampling_strategy: str = online("train_sampling_strategy")
    data_seed: int | None = online("data_seed")
    dataloader_drop_last: bool = online("dataloader_drop_last")
    parallelism_config: ParallelismConfig | None = parallelism_config("GRPOTrainer")
    mesh_shape: str | None = mesh_shape("GRPOTrainer")
    auto_find_batch_size: bool = auto_find_batch_size("GRPO")

    router_aux_loss_coef: float | None = online("router_aux_loss_coef")
    disable_dropout: bool = online("disable_dropout", default=False)
    cast_lm_head_to_fp32: bool = arg(
        False, help="Compute logits in float32 (ScaleRL, https://huggingface.co/papers/2510.13786)."
    )

    remove_unused_columns: bool | None = online("remove_unused_columns")
    num_generations: int | None = online("num_generations")
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

    beta: float = online("beta")
    num_iterations: int = online("num_iterations")
    epsilon: float = online("epsilon")
    delta: float | None = arg(
        None,
        help="Upper bound of the policy ratio for negative advantages. If unset, no bound.",
        rule=rules.number(0, optional=True, most=rules.MOST_FLOAT32),
    )
    epsilon_high: float | None = online("epsilon_high")
    sapo_temperature_neg: float = arg(
        1.05,
        help="Temperature of 'sapo' for advantages <= 0.",
        rule=rules.number(1e-9, most=rules.MOST_FLOAT32),
    )
    sapo_temperature_pos: float = arg(
        1.0,
        help="Temperature of 'sapo' for advantages > 0.",
        rule=rules.number(1e-9, most=rules.MOST_FLOAT32),
    )
    vespo_k_pos: float = arg(
        2.0, help="k of 'vespo' for advantages >= 0.", rule=rules.number(0, most=rules.MOST_FLOAT32)
    )
    vespo_lambda_pos: float = arg(
        3.0,
        help="lambda of 'vespo' for advantages >= 0.",
        rule=rules.number(0, most=rules.MOST_FLOAT32),
    )
    vespo_k_neg: float = arg(
        3.0, help="k of 'vespo' for advantages < 0.", rule=rules.number(0, most=rules.MOST_FLOAT32)
    )
    vespo_lambda_neg: float = arg(
        2.0, help="lambda of 'vespo' for advantages < 0.", rule=rules.number(0, most=rules.MOST_FLOAT32)
    )
    importance_sampling_level: str = arg(
        "token",
        help="'token' uses a policy ratio per token, 'sequence' one per completion (GSPO).",
        rule=_named(
            ("token", "sequence"), "Unknown importance sampling level: {}. Possible values are 'token' and 'sequence'."
        ),
    )
    reward_weights: list[float] | None = online("reward_weights")
    multi_objective_aggregation: str = arg(
        "sum_then_normalize",
        help="How several rewards are combined: 'sum_then_normalize' or 'normalize_then_sum' (GDPO).",
        rule=_named(
            ("sum_then_normalize", "normalize_then_sum"),
            "Invalid multi_objective_aggregation: {}. Must be 'sum_then_normalize' or 'normalize_then_sum'.",
        ),
    )
    scale_rewards: str = arg(
        "group",
        help="Divide advantages by the standard deviation of the rewards in the 'group' or in the "
        "'batch'; 'none' does not divide.",
        rule=_named(
            ("batch", "group", "none"),
            "Invalid value for scale_rewards: {}. Must be one of 'batch', 'group', or 'none'.",
        ),
    )
    loss_type: str = arg(
        "dapo",
        help="The loss: 'grpo', 'dr_grpo', 'dapo', 'bnpo', 'cispo', 'sapo', 'luspo' or 'vespo'.",
        rule=_named(GRPO_LOSSES, f"Unknown loss type: {{}}. Should be one of {list(GRPO_LOSSES)}"),
    )
    mask_truncated_completions: bool = online("mask_truncated_completions")
    sync_ref_model: bool = online("sync_ref_model")
    ref_model_mixup_alpha: float = online("ref_model_mixup_alpha")
    ref_model_sync_steps: int = online("ref_model_sync_steps")
    top_entropy_quantile: float = arg(
        1.0,
        help="Fraction of the tokens that count in the loss: those with the highest entropy.",
        rule=rules.number(0, most=1.0),
    )
    entropy_coef: float = arg(
        0.0,
        help="Weight of the entropy bonus: the mean token entropy, which is subtracted from the loss.",
        rule=_any_number,
    )
    use_adaptive_entropy: bool = arg(
        False,
        help="Adapt entropy_coef after each step so that the entropy approaches entropy_target "
        "(Skywork-OR1, https://huggingface.co/papers/2505.22312).",
    )
    entropy_coef_min: float = arg(0.0, help="Lower bound of the adapted entropy_coef.", rule=_least_entropy_coef)
    entropy_coef_max: float = arg(1.0, help="Upper bound of the adapted entropy_coef.", rule=_any_number)
    entropy_coef_delta: float = arg(
        0.005,
        help="Amount by which entropy_coef changes per step when it is adapted.",
        rule=rules.number(0, most=rules.MOST_FLOAT32),
    )
    entropy_target: float = arg(0.2, help="Target of the mean token entropy, in nats.", rule=_any_number)
    max_tool_calling_iterations: int | None = online("max_tool_calling_iterations")
    vllm_importance_sampling_correction: bool = arg(
        True, help="With use_vllm: multiply the loss by the importance ratio of policy to sampler.", how="mapped"
    )
    vllm_importance_sampling_mode: str = arg(
        "sequence_mask",
        help="Whether importance ratios are per token or per sequence, and truncated at the bounds or "
        "masked beyond them: 'token_truncate', 'token_mask', 'sequence_truncate' or 'sequence_mask'.",
        how="mapped",
        rule=_correction,
    )
    vllm_importance_sampling_clip_max: float | None = arg(
        3.0,
        help="Upper bound of the importance ratio of policy to sampler. If unset, none.",
        how="mapped",
        rule=rules.number(0, optional=True),
    )
    vllm_importance_sampling_clip_min: float | None = arg(
        None,
        help="Lower bound of the importance ratio of policy to sampler. If unset, none.",
        how="mapped",
        rule=_least_ratio,
    )
    off_policy_mask_threshold: float | None = arg(
        None,
        help="Mask completions with a negative advantage whose mean log-ratio of sampler to policy is above this.",
        rule=rules.number(-rules.MOST_FLOAT32, optional=True, most=rules.MOST_FLOAT32),
    )
    use_bias_correction_kl: bool = arg(True, help="Multiply the KL penalty by the policy ratio.")

    log_completions: bool = online("log_completions")
    log_multimodal: bool = online("log_multimodal")
    num_completions_to_print: int | None = online("num_completions_to_print")
    log_unique_prompts: bool = online("log_unique_prompts")
    log_completions_hub_repo: str | None = arg(
        None,
        help="Hub dataset to upload the completions to, every two minutes and at the end. Requires log_completions.",
        rule=_hub_repo,
    )

    use_transformers_continuous_batching: bool = online("use_transformers_continuous_batching")
    transformers_continuous_batching_config: dict | str | None = online("transformers_continuous_batching_config")

    use_transformers_paged: bool = online("use_transformers_paged")
    vllm_importance_sampling_cap: float | None = arg(
        None,
        rule=rules.number(0, optional=True),
        help="Deprecated: use vllm_importance_sampling_clip_max.",
        how="mapped",
    )

    max_prompt_length: int | None = online("max_prompt_length")
    chat_template_path: str | None = online("chat_template_path", kw_only=True)
    vllm_weights_dir: str | None = online("vllm_weights_dir", kw_only=True)
    max_completions_per_device: int | None = online("max_completions_per_device", kw_only=True)
    reward_timeout: float | None = online("reward_timeout")

    def __post_init__(self):
        caller = self._frames_to_caller()
        generation.warn_about_deprecated(self, caller)
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        if self.vllm_importance_sampling_cap is not None:
            warnings.warn(
                "The `vllm_importance_sampling_cap` argument is deprecated and will be removed in v2.0.0. Use "
                "`vllm_importance_sampling_clip_max` instead.",
                FutureWarning,
                stacklevel=caller,
            )
            self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap
        super().__post_init__()
        if self.counts_devices:
            self.settle_sizes()

    def settle_sizes(self) -> None:
        generation.settle_sizes("GRPO", self)
