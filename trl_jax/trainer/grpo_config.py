"""GRPOConfig."""

import warnings
from dataclasses import dataclass, field
from typing import ClassVar

from trl_jax.config import base, generation
from trl_jax.config.base import BaseConfig
from trl_jax.config.generation import shared
from trl_jax.config.tables import GRPO


@dataclass(repr=False)
class GRPOConfig(BaseConfig):
    """The arguments of GRPOTrainer, in TRL's names, defaults and positional order; our own come last.

    Besides the fields of TrainingArguments and of BaseConfig (batch_layout, remat_policy, mesh_shape and others):

        router_aux_loss_coef: weight of the load-balancing loss of mixtures of experts; None takes the model's own, 0.0
            leaves it out.
        disable_dropout: trains without dropout.
        cast_lm_head_to_fp32: computes logits in float32 (ScaleRL, https://huggingface.co/papers/2510.13786).
        remove_unused_columns: keeps the prompts alone; reward functions are then given no other columns.
        num_generations, num_generations_eval: completions of each prompt, in training and in evaluations.
        max_completion_length: most tokens of a completion.
        shuffle_dataset: takes the prompts in random order, by `seed`.
        pad_to_multiple_of: row lengths in tokens are rounded up to a multiple of it; "auto" rounds up to a short ladder
            of lengths, so that few shapes compile. Losses do not depend on it.
        generation_batch_size: completions that are written at once, on all devices; or
        steps_per_generation: micro-batches that they are divided into, gradient_accumulation_steps unless set.
        temperature: logits are divided by it, when tokens are sampled and in the loss.
        top_p, top_k, min_p, repetition_penalty: how tokens are sampled, as in transformers; `generation_kwargs` has
            more of its GenerationConfig's fields, and wins.
        chat_template_kwargs: arguments of the chat template.
        use_vllm, vllm_*, use_transformers_continuous_batching: accepted; completions are written by trl_jax's own
            generator, in this process.
        beta: the factor of the divergence from the reference; 0.0 does without a reference.
        num_iterations: times that the completions of a generation are trained on.
        epsilon, epsilon_high, delta, loss_type, importance_sampling_level, sapo_*, vespo_*, off_policy_mask_threshold,
            use_bias_correction_kl, top_entropy_quantile: the loss; `trl_jax.losses.policy_gradient` has the formulas.
        reward_weights: the weight of each reward function.
        multi_objective_aggregation: "sum_then_normalize" or "normalize_then_sum", of several reward functions.
        scale_rewards: the standard deviation that advantages are divided by: of the "group" (True), of the "batch", or
            "none" (False).
        mask_truncated_completions: leaves completions out of the loss that were cut at max_completion_length.
        sync_ref_model: moves the reference towards the policy every `ref_model_sync_steps` steps (TR-DPO,
            https://huggingface.co/papers/2404.09656, equation 3), to `ref_model_mixup_alpha` times the policy and the
            rest the reference. Checkpoints then have the reference, too.
        entropy_coef: the factor of the tokens' mean entropy in the loss, which it lowers.
        use_adaptive_entropy: moves entropy_coef by `entropy_coef_delta` a step, between `entropy_coef_min` and
            `entropy_coef_max`, towards a mean entropy of `entropy_target` nats (Skywork-OR1,
            https://huggingface.co/papers/2505.22312).
        max_tool_calling_iterations: most turns in which tools are called; None: any number.
        vllm_importance_sampling_*: read with `use_vllm`: how the ratio of policy and sampler counts.
        log_completions: shows completions in a table of `num_completions_to_print` rows, or all, and writes them to
            output_dir/completions; trackers get each prompt once with `log_unique_prompts`.
        log_completions_hub_repo: dataset on the Hub that gets these files, too, every two minutes and at the end.
        max_prompt_length: deprecated; the number of a prompt's last tokens that stay. None: all.
        chat_template_path: .jinja or .j2 file with the chat template to use, or folder or Hub name of the tokenizer
            that has it; its new tokens come, too.
        reward_timeout: seconds that an asynchronous reward function may take; None: any. Not in TRL.
    """

    argument_table = GRPO
    _argument_group_name = "training"
    max_length: ClassVar[None] = None  # prompts are not cut, completions have a limit of their own
    dataset_num_proc: ClassVar[None] = None
    _VALID_DICT_FIELDS = BaseConfig._VALID_DICT_FIELDS + [
        "transformers_continuous_batching_config", "generation_kwargs", "chat_template_kwargs",
    ]  # fmt: skip

    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate of AdamW."})

    router_aux_loss_coef: float | None = base.router_aux_loss_coef()
    disable_dropout: bool = base.disable_dropout(False)
    cast_lm_head_to_fp32: bool = field(default=False, metadata={"help": "Compute logits in float32."})

    remove_unused_columns: bool | None = shared("remove_unused_columns", False)
    num_generations: int | None = shared("num_generations", 8)
    num_generations_eval: int | None = shared("num_generations_eval", None)
    max_completion_length: int | None = shared("max_completion_length", 512)
    ds3_gather_for_generation: bool = shared("ds3_gather_for_generation", True)
    shuffle_dataset: bool | None = shared("shuffle_dataset", True)
    pad_to_multiple_of: int | str | None = base.pad_to_multiple_of()

    generation_batch_size: int | None = shared("generation_batch_size", None)
    steps_per_generation: int | None = shared("steps_per_generation", None)
    temperature: float = shared("temperature", 1.0)
    top_p: float = shared("top_p", 1.0)
    top_k: int = shared("top_k", 0)
    min_p: float | None = shared("min_p", None)
    generation_kwargs: dict | str | None = shared("generation_kwargs", None)
    chat_template_kwargs: dict | str | None = shared("chat_template_kwargs", None)
    repetition_penalty: float = shared("repetition_penalty", 1.0)
    cache_implementation: str | None = shared("cache_implementation", None)

    use_vllm: bool = shared("use_vllm", False)
    vllm_mode: str = shared("vllm_mode", "colocate")
    vllm_model_impl: str = shared("vllm_model_impl", "vllm")
    vllm_enable_sleep_mode: bool = shared("vllm_enable_sleep_mode", False)
    vllm_structured_outputs_regex: str | None = shared("vllm_structured_outputs_regex", None)
    vllm_server_base_url: str | None = shared("vllm_server_base_url", None)
    vllm_server_host: str = shared("vllm_server_host", "0.0.0.0")
    vllm_server_port: int = shared("vllm_server_port", 8000)
    vllm_server_timeout: float = shared("vllm_server_timeout", 240.0)
    vllm_group_port: int = shared("vllm_group_port", 51216)
    vllm_gpu_memory_utilization: float = shared("vllm_gpu_memory_utilization", 0.3)
    vllm_max_model_length: int | None = shared("vllm_max_model_length", None)
    vllm_tensor_parallel_size: int = shared("vllm_tensor_parallel_size", 1)

    beta: float = field(
        default=0.0, metadata={"help": "Factor of the divergence from the reference; 0.0: no reference."}
    )
    num_iterations: int = shared("num_iterations", 1)
    epsilon: float = shared("epsilon", 0.2)
    delta: float | None = field(
        default=None, metadata={"help": "Most that the ratio counts where the advantage is negative. Unset, any."}
    )
    epsilon_high: float | None = shared("epsilon_high", None)
    sapo_temperature_neg: float = field(
        default=1.05, metadata={"help": "Temperature of 'sapo' where the advantage is not positive."}
    )
    sapo_temperature_pos: float = field(
        default=1.0, metadata={"help": "Temperature of 'sapo' where the advantage is positive."}
    )
    vespo_k_pos: float = field(default=2.0, metadata={"help": "k of 'vespo' where the advantage is not negative."})
    vespo_lambda_pos: float = field(
        default=3.0, metadata={"help": "lambda of 'vespo' where the advantage is not negative."}
    )
    vespo_k_neg: float = field(default=3.0, metadata={"help": "k of 'vespo' where the advantage is negative."})
    vespo_lambda_neg: float = field(
        default=2.0, metadata={"help": "lambda of 'vespo' where the advantage is negative."}
    )
    importance_sampling_level: str = field(
        default="token", metadata={"help": "Ratios of each 'token', or one of the 'sequence' (GSPO)."}
    )
    reward_weights: list[float] | None = field(
        default=None, metadata={"help": "Weight of each reward function. Unset, 1.0."}
    )
    multi_objective_aggregation: str = field(
        default="sum_then_normalize",
        metadata={"help": "Of several rewards: 'sum_then_normalize', or 'normalize_then_sum' (GDPO)."},
    )
    scale_rewards: str = field(
        default="group",
        metadata={"help": "Divide advantages by the standard deviation of the 'group', of the 'batch', or 'none'."},
    )
    loss_type: str = field(
        default="dapo",
        metadata={"help": "The loss: 'grpo', 'dr_grpo', 'dapo', 'bnpo', 'cispo', 'sapo', 'luspo' or 'vespo'."},
    )
    mask_truncated_completions: bool = shared("mask_truncated_completions", False)
    sync_ref_model: bool = base.sync_ref_model()
    ref_model_mixup_alpha: float = base.ref_model_mixup_alpha()
    ref_model_sync_steps: int = base.ref_model_sync_steps()
    top_entropy_quantile: float = field(
        default=1.0, metadata={"help": "Share of the tokens, those of highest entropy, whose loss counts."}
    )
    entropy_coef: float = field(default=0.0, metadata={"help": "Factor of the entropy that lowers the loss."})
    use_adaptive_entropy: bool = field(
        default=False, metadata={"help": "Move entropy_coef after each step, towards entropy_target."}
    )
    entropy_coef_min: float = field(default=0.0, metadata={"help": "Least entropy_coef that it moves to."})
    entropy_coef_max: float = field(default=1.0, metadata={"help": "Largest entropy_coef that it moves to."})
    entropy_coef_delta: float = field(default=0.005, metadata={"help": "How far it moves in a step."})
    entropy_target: float = field(
        default=0.2, metadata={"help": "Mean entropy of tokens in nats, up to which the bonus counts."}
    )
    max_tool_calling_iterations: int | None = shared("max_tool_calling_iterations", None)
    vllm_importance_sampling_correction: bool = field(
        default=True, metadata={"help": "With use_vllm: multiply losses by the ratio of policy and sampler."}
    )
    vllm_importance_sampling_mode: str = field(
        default="sequence_mask",
        metadata={
            "help": "Ratios of each token or of the sequence, truncated or left out beyond the bounds: "
            "'token_truncate', 'token_mask', 'sequence_truncate' or 'sequence_mask'."
        },
    )
    vllm_importance_sampling_clip_max: float | None = field(
        default=3.0, metadata={"help": "Upper bound of that ratio. Unset, none."}
    )
    vllm_importance_sampling_clip_min: float | None = field(
        default=None, metadata={"help": "Lower bound of that ratio. Unset, none."}
    )
    off_policy_mask_threshold: float | None = field(
        default=None,
        metadata={
            "help": "Leave completions of a negative advantage out whose mean log-ratio of sampler and policy is above."
        },
    )
    use_bias_correction_kl: bool = field(
        default=True, metadata={"help": "Multiply the divergence from the reference by the ratio."}
    )

    log_completions: bool = shared("log_completions", False)
    log_multimodal: bool = shared("log_multimodal", True)
    num_completions_to_print: int | None = shared("num_completions_to_print", None)
    log_unique_prompts: bool = shared("log_unique_prompts", False)
    log_completions_hub_repo: str | None = field(
        default=None, metadata={"help": "Dataset on the Hub that gets the completions, with log_completions."}
    )

    use_transformers_continuous_batching: bool = shared("use_transformers_continuous_batching", False)
    transformers_continuous_batching_config: dict | str | None = shared("transformers_continuous_batching_config", None)

    use_transformers_paged: bool = shared("use_transformers_paged", False)
    vllm_importance_sampling_cap: float | None = field(
        default=None, metadata={"help": "Deprecated: vllm_importance_sampling_clip_max."}
    )

    max_prompt_length: int | None = generation.max_prompt_length()
    chat_template_path: str | None = base.chat_template_path(kw_only=True)
    reward_timeout: float | None = field(
        default=None,
        kw_only=True,
        metadata={"help": "Seconds that an asynchronous reward function may take. Unset, any."},
    )

    def __post_init__(self):
        caller = self._frames_to_caller()
        generation.warn_of_old(self, caller)
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
