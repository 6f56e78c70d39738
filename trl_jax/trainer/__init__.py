"""The trainers and configs that users call, under TRL's own module names."""

from __future__ import annotations

from trl_jax.core.lazy import fetching
from trl_jax.core.trainers import WHERE
from trl_jax.hub.torch.models_aside import leave_models_aside

leave_models_aside()  # before a trainer imports transformers' callbacks

_WHERE = WHERE | {
    "BEMACallback": "trl_jax.trainer.callbacks",
    "ConstantLengthDataset": "trl_jax.trainer.collators.constant_length",
    "DataCollatorForCompletionOnlyLM": "trl_jax.trainer.collators.older",
    "DataCollatorForLanguageModeling": "trl_jax.trainer.collators.padded",
    "DataCollatorForPreference": "trl_jax.trainer.collators.padded",
    "LogCompletionsCallback": "trl_jax.trainer.callbacks",
    "ModelConfig": "trl_jax.trainer.model_config",
    "RewardDataCollatorWithPadding": "trl_jax.trainer.collators.older",
    "RichProgressCallback": "trl_jax.trainer.callbacks",
    "compute_accuracy": "trl_jax.trainer.utils",
    "get_kbit_device_map": "trl_jax.trainer.utils",
    "get_peft_config": "trl_jax.trainer.utils",
    "get_quantization_config": "trl_jax.trainer.utils",
}
__getattr__ = fetching(__name__, _WHERE)
