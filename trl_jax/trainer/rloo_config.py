"""RLOOConfig."""

from dataclasses import dataclass, field
from typing import ClassVar

from trl_jax.config import base, generation
from trl_jax.config.base import BaseConfig
from trl_jax.config.generation import shared
from trl_jax.config.tables import RLOO
from trl_jax.legacy import arguments


@dataclass(repr=False)
class RLOOConfig(BaseConfig):
    """The arguments of RLOOTrainer, in TRL's names, defaults and positional order; our own come last.

    Besides the fields of TrainingArguments and of BaseConfig (batch_layout, remat_policy, mesh_shape and others):

        router_aux_loss_coef: weight of the load-balancing loss of mixtures of experts; None takes the model's own, 0.0
            leaves it out.
        disable_dropout: trains without dropout.
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
        beta: the factor of the divergence from the reference that is taken off a reward; 0.0 does without a reference.
        num_iterations: times that the completions of a generation are trained on.
        epsilon, epsilon_high: how far below and above 1 the ratio of new and old policy counts.
        reward_weights: the weight of each reward function.
        normalize_advantages: divides advantages by the standard deviation of all, once their mean is taken off.
        reward_clip_range: bounds of a completion's weighted reward.
        mask_truncated_completions: leaves completions out of the loss that were cut at max_completion_length.
        sync_ref_model: moves the reference towards the policy every `ref_model_sync_steps` steps (TR-DPO,
            https://huggingface.co/papers/2404.09656, equation 3), to `ref_model_mixup_alpha` times the policy and the
            rest the reference. Checkpoints then have the reference, too.
        log_completions: shows completions in a table of `num_completions_to_print` rows, or all; trackers get each
            prompt once with `log_unique_prompts`.
        max_prompt_length: deprecated; the number of a prompt's last tokens that stay. None: all.
        chat_template_path: .jinja or .j2 file with the chat template to use, or folder or Hub name of the tokenizer
            that has it; its new tokens come, too.
        reward_timeout: seconds that an asynchronous reward function may take; None: any. Not in TRL.
        missing_eos_penalty, total_episodes: deprecated, of TRL up to 0.21: what is taken off the reward of a completion
            that does not end, and how many completions are written in all, from which max_steps is made.
        reward_model_path, sft_model_path, sanity_check: deprecated; read by scripts alone.
    """

    argument_table = RLOO
    _argument_group_name = "training"
    max_length: ClassVar[None] = None  # prompts are not cut, completions have a limit of their own
    dataset_num_proc: ClassVar[None] = None
    _VALID_DICT_FIELDS = BaseConfig._VALID_DICT_FIELDS + [
        "transformers_continuous_batching_config", "generation_kwargs", "chat_template_kwargs",
    ]  # fmt: skip

    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate of AdamW."})

    router_aux_loss_coef: float | None = base.router_aux_loss_coef()
    disable_dropout: bool = base.disable_dropout(False)

    remove_unused_columns: bool | None = shared("remove_unused_columns", False)
    num_generations: int | None = shared("num_generations", 2)
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
        default=0.05, metadata={"help": "What the divergence from the reference takes off a reward; 0.0: no reference."}
    )
    num_iterations: int = shared("num_iterations", 1)
    epsilon: float = shared("epsilon", 0.2)
    epsilon_high: float | None = shared("epsilon_high", None)
    reward_weights: list[float] | None = field(
        default=None, metadata={"help": "Weight of each reward function. Unset, 1.0."}
    )
    normalize_advantages: bool = field(
        default=False, metadata={"help": "Divide advantages by the standard deviation of all, their mean taken off."}
    )
    reward_clip_range: tuple[float, float] | None = field(
        default=None, metadata={"help": "Bounds of a completion's weighted reward, as in -10.0 10.0. Unset, none."}
    )
    mask_truncated_completions: bool = shared("mask_truncated_completions", False)
    sync_ref_model: bool = base.sync_ref_model()
    ref_model_mixup_alpha: float = base.ref_model_mixup_alpha()
    ref_model_sync_steps: int = base.ref_model_sync_steps()

    log_completions: bool = shared("log_completions", False)
    log_multimodal: bool = shared("log_multimodal", True)
    num_completions_to_print: int | None = shared("num_completions_to_print", None)
    log_unique_prompts: bool = shared("log_unique_prompts", False)

    use_transformers_continuous_batching: bool = shared("use_transformers_continuous_batching", False)
    transformers_continuous_batching_config: dict | str | None = shared("transformers_continuous_batching_config", None)

    use_transformers_paged: bool = shared("use_transformers_paged", False)

    max_prompt_length: int | None = generation.max_prompt_length()
    chat_template_path: str | None = base.chat_template_path(kw_only=True)
    reward_timeout: float | None = field(
        default=None,
        kw_only=True,
        metadata={"help": "Seconds that an asynchronous reward function may take. Unset, any."},
    )

    missing_eos_penalty: float | None = arguments.missing_eos_penalty()
    total_episodes: int | None = arguments.total_episodes()
    reward_model_path: str | None = arguments.path("the reward model")
    sft_model_path: str | None = arguments.path("the policy")
    sanity_check: bool = arguments.sanity_check()

    def __post_init__(self):
        arguments.warn(self, self._frames_to_caller())
        generation.warn_of_old(self, self._frames_to_caller())
        super().__post_init__()
        if self.counts_devices:
            self.settle_sizes()

    def settle_sizes(self) -> None:
        generation.settle_sizes("RLOO", self)
        arguments.settle_steps(self)
