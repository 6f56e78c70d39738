"""The trainers and configs that users call, under TRL's own module names."""

from __future__ import annotations

from trl_jax.core.lazy import fetching

_WHERE = {
    "DataCollatorForLanguageModeling": "trl_jax.trainer.collator",
    "DataCollatorForPreference": "trl_jax.trainer.collator",
    "ModelConfig": "trl_jax.trainer.model_config",
    "RewardConfig": "trl_jax.trainer.reward_config",
    "RewardTrainer": "trl_jax.trainer.reward_trainer",
    "RichProgressCallback": "trl_jax.trainer.callbacks",
    "SFTConfig": "trl_jax.trainer.sft_config",
    "SFTTrainer": "trl_jax.trainer.sft_trainer",
    "compute_accuracy": "trl_jax.trainer.utils",
    "get_peft_config": "trl_jax.trainer.utils",
    "get_quantization_config": "trl_jax.trainer.utils",
}
__getattr__ = fetching(__name__, _WHERE)
