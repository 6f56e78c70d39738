"""TEMP"""
from dataclasses import dataclass
import inspect
from trl_jax.core.arguments.base import BASE
from trl_jax.run.arguments.base_config import BaseConfig

@dataclass(repr=False)
class RLOOConfig(BaseConfig):
    learning_rate: float = 1e-6
    logging_steps: float = 10
    disable_dropout: bool = False
    router_aux_loss_coef: float | None = None
    pad_to_multiple_of: int | str | None = "auto"
    num_generations: int = 2
    num_generations_eval: int | None = None
    max_completion_length: int = 512
    shuffle_dataset: bool = True
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    generation_kwargs: dict | None = None
    chat_template_kwargs: dict | None = None
    beta: float = 0.05
    num_iterations: int = 1
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    importance_sampling_level: str = "token"
    loss_type: str = "dapo"
    off_policy_mask_threshold: float | None = None
    use_bias_correction_kl: bool = True
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    reward_weights: list | None = None
    multi_objective_aggregation: str = "sum_then_normalize"
    scale_rewards: str = "group"
    mask_truncated_completions: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    normalize_advantages: bool = False
    reward_clip_range: tuple | None = None
    log_completions: bool = False
    max_prompt_length: int | None = None
    max_length = None
    dataset_num_proc = None

    def __post_init__(self):
        super().__post_init__()
        self.bf16 = False
        W = 1
        D = self.per_device_train_batch_size * W
        if self.steps_per_generation is None: self.steps_per_generation = self.gradient_accumulation_steps if self.generation_batch_size is None else self.generation_batch_size // D
        if self.generation_batch_size is None: self.generation_batch_size = D * self.steps_per_generation
        if isinstance(self.scale_rewards, bool): self.scale_rewards = "group" if self.scale_rewards else "none"
