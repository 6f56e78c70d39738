"""OnlineConfig."""

from dataclasses import dataclass
from typing import ClassVar

from transformers.training_args import ParallelismConfig

from trl_jax.config import generation, rules
from trl_jax.config.arguments import arg
from trl_jax.config.base import BaseConfig
from trl_jax.config.generation import auto_find_batch_size, mesh_shape, online, parallelism_config


@dataclass(repr=False)
class OnlineConfig(BaseConfig):
    """The arguments of all online trainers with reward functions. Derive the config of your own trainer from it."""

    max_length: ClassVar[None] = None  # prompts are not truncated; completions have max_completion_length
    dataset_num_proc: ClassVar[None] = None
    _VALID_DICT_FIELDS = BaseConfig._VALID_DICT_FIELDS + ["generation_kwargs", "chat_template_kwargs"]

    learning_rate: float = online("learning_rate")
    train_sampling_strategy: str = online("train_sampling_strategy")
    data_seed: int | None = online("data_seed")
    dataloader_drop_last: bool = online("dataloader_drop_last")
    parallelism_config: ParallelismConfig | None = parallelism_config("OnlineTrainer")
    mesh_shape: str | None = mesh_shape("OnlineTrainer")
    auto_find_batch_size: bool = auto_find_batch_size("OnlineTrainer")
    router_aux_loss_coef: float | None = online("router_aux_loss_coef")
    disable_dropout: bool = online("disable_dropout", default=False)

    remove_unused_columns: bool | None = online("remove_unused_columns")
    num_generations: int = online("num_generations")
    num_generations_eval: int | None = online("num_generations_eval")
    max_completion_length: int = online("max_completion_length")
    max_prompt_length: int | None = online("max_prompt_length")
    shuffle_dataset: bool = online("shuffle_dataset")
    pad_to_multiple_of: int | str | None = online("pad_to_multiple_of")

    generation_batch_size: int | None = online("generation_batch_size")
    steps_per_generation: int | None = online("steps_per_generation")
    num_iterations: int = online("num_iterations")
    temperature: float = online("temperature")
    top_p: float = online("top_p")
    top_k: int = online("top_k")
    min_p: float | None = online("min_p")
    repetition_penalty: float = online("repetition_penalty")
    generation_kwargs: dict | str | None = online("generation_kwargs")
    chat_template_kwargs: dict | str | None = online("chat_template_kwargs")

    beta: float = online("beta")
    reward_weights: list[float] | None = online("reward_weights")
    reward_timeout: float | None = online("reward_timeout")
    scale_rewards: str = arg(
        "group",
        help="Divide advantages by the standard deviation of the rewards in the 'group' or in the "
        "'batch'; 'none' does not divide.",
        rule=rules.one_of("batch", "group", "none"),
    )
    mask_truncated_completions: bool = online("mask_truncated_completions")
    sync_ref_model: bool = online("sync_ref_model")
    ref_model_mixup_alpha: float = online("ref_model_mixup_alpha")
    ref_model_sync_steps: int = online("ref_model_sync_steps")

    log_completions: bool = online("log_completions")
    num_completions_to_print: int | None = online("num_completions_to_print")
    log_unique_prompts: bool = online("log_unique_prompts")
    chat_template_path: str | None = online("chat_template_path", kw_only=True)
    max_completions_per_device: int | None = online("max_completions_per_device", kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        if self.counts_devices:
            self.resolve_sizes()

    def resolve_sizes(self) -> None:
        generation.resolve_sizes(type(self).__name__.removesuffix("Config"), self)
