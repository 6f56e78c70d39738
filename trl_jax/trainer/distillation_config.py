"""DistillationConfig."""

from dataclasses import dataclass
from typing import Any, ClassVar

from transformers.training_args import ParallelismConfig

from trl_jax.config import rules
from trl_jax.config.arguments import arg
from trl_jax.config.base import BaseConfig
from trl_jax.config.generation import mesh_shape, online, parallelism_config


@dataclass(repr=False)
class DistillationConfig(BaseConfig):
    """The arguments of DistillationTrainer, in TRL's names, defaults and positional order; our own come last."""

    _argument_group_name = "training"
    max_length: ClassVar[None] = None  # prompts are not truncated; completions have max_completion_length
    dataset_num_proc: ClassVar[None] = None
    # A generation is one step, with one completion per prompt, and all completions are trained on.
    num_generations: ClassVar[int] = 1
    num_generations_eval: ClassVar[None] = None
    num_iterations: ClassVar[int] = 1
    mask_truncated_completions: ClassVar[bool] = False
    router_aux_loss_coef: ClassVar[float] = 0.0  # as in TRL, no load-balancing loss
    _VALID_DICT_FIELDS = BaseConfig._VALID_DICT_FIELDS + [
        "teacher_model_init_kwargs", "generation_kwargs", "chat_template_kwargs",
    ]  # fmt: skip

    learning_rate: float = online("learning_rate")
    train_sampling_strategy: str = online("train_sampling_strategy")
    data_seed: int | None = online("data_seed")
    dataloader_drop_last: bool = online("dataloader_drop_last")
    parallelism_config: ParallelismConfig | None = parallelism_config("DistillationTrainer")
    mesh_shape: str | None = mesh_shape("DistillationTrainer")

    teacher_model_name_or_path: str | None = arg(
        None, help="Teacher model: a checkpoint's folder or Hub id.", rule=rules.path
    )
    teacher_model_revision: str | None = arg(
        None, help="Branch, tag or commit of the teacher.", rule=rules.text(optional=True)
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = arg(
        None, help="Other arguments of from_pretrained for the teacher, as a dict or JSON.", rule=rules.a_dict
    )
    disable_dropout: bool = online("disable_dropout", default=False)

    remove_unused_columns: bool | None = online("remove_unused_columns")
    max_completion_length: int | None = online("max_completion_length")
    ds3_gather_for_generation: bool = online("ds3_gather_for_generation")
    shuffle_dataset: bool | None = online("shuffle_dataset")
    pad_to_multiple_of: int | str | None = online("pad_to_multiple_of")

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

    beta: float = arg(
        1.0,
        help="Divergence between student and teacher: 0.0 is the forward KL, 1.0 the reverse KL, and "
        "values between them a generalized Jensen-Shannon divergence.",
        rule=rules.number(0, most=1.0),
    )
    max_tool_calling_iterations: int | None = online("max_tool_calling_iterations")

    log_completions: bool = online("log_completions")
    num_completions_to_print: int | None = online("num_completions_to_print")
    log_unique_prompts: bool = online("log_unique_prompts")

    max_prompt_length: int | None = online(
        "max_prompt_length", help="Number of tokens to keep of a prompt, counted from its end. If unset, all."
    )
    chat_template_path: str | None = online("chat_template_path", kw_only=True)
    vllm_server_restart_timeout: float | None = online("vllm_server_restart_timeout", kw_only=True)
    vllm_weights_dir: str | None = online("vllm_weights_dir", kw_only=True)
    max_completions_per_device: int | None = online("max_completions_per_device", kw_only=True)

    @property
    def generation_batch_size(self) -> int:
        """Completions per generation, over all devices."""
        return self.per_device_train_batch_size * self.data_parallel_size * self.gradient_accumulation_steps

    @property
    def steps_per_generation(self) -> int:
        """Micro-batches per generation."""
        return self.gradient_accumulation_steps
