"""The trainers and configs that users call, under TRL's own module names."""

from __future__ import annotations

from trl_jax.core.trainers import WHERE, lazy_getattr

_WHERE = WHERE | {
    "BEMACallback": "trl_jax.trainer.callbacks",
    "ConstantLengthDataset": "trl_jax.legacy.collators",
    "DataCollatorForCompletionOnlyLM": "trl_jax.legacy.collators",
    "DataCollatorForLanguageModeling": "trl_jax.trainer.collators",
    "DataCollatorForPreference": "trl_jax.trainer.collators",
    "LogCompletionsCallback": "trl_jax.trainer.callbacks",
    "ModelConfig": "trl_jax.trainer.model_config",
    "RewardDataCollatorWithPadding": "trl_jax.legacy.collators",
    "RichProgressCallback": "trl_jax.trainer.callbacks",
    "compute_accuracy": "trl_jax.trainer.utils",
    "get_kbit_device_map": "trl_jax.trainer.utils",
    "get_peft_config": "trl_jax.trainer.utils",
    "get_quantization_config": "trl_jax.trainer.utils",
}
__getattr__ = lazy_getattr(__name__, _WHERE)
