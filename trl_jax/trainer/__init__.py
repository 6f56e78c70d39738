"""The trainers and configs that users call, under TRL's own module names."""

from __future__ import annotations

from trl_jax.core.lazy import fetching
from trl_jax.core.trainers import WHERE

_WHERE = WHERE | {
    "DataCollatorForLanguageModeling": "trl_jax.trainer.collator",
    "DataCollatorForPreference": "trl_jax.trainer.collator",
    "ModelConfig": "trl_jax.trainer.model_config",
    "RichProgressCallback": "trl_jax.trainer.callbacks",
    "compute_accuracy": "trl_jax.trainer.utils",
    "get_peft_config": "trl_jax.trainer.utils",
    "get_quantization_config": "trl_jax.trainer.utils",
}
__getattr__ = fetching(__name__, _WHERE)
