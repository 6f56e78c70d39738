"""trl_jax: TRL's trainers on JAX. Change `from trl import ...` to `from trl_jax import ...`.

Importing this module loads nothing: every name is fetched when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see
    from trl_jax.hub.pretrained import AutoModelForSequenceClassification, PreTrainedModel
    from trl_jax.losses.pairwise import pairwise_loss
    from trl_jax.scripts.utils import ScriptArguments, TrlParser
    from trl_jax.trainer.model_config import ModelConfig
    from trl_jax.trainer.reward_config import RewardConfig
    from trl_jax.trainer.reward_trainer import RewardTrainer

__version__ = "0.1.0"

_WHERE = {
    "AutoModelForSequenceClassification": "trl_jax.hub.pretrained",
    "ModelConfig": "trl_jax.trainer.model_config",
    "PreTrainedModel": "trl_jax.hub.pretrained",
    "RewardConfig": "trl_jax.trainer.reward_config",
    "RewardTrainer": "trl_jax.trainer.reward_trainer",
    "ScriptArguments": "trl_jax.scripts.utils",
    "TrlParser": "trl_jax.scripts.utils",
    "pairwise_loss": "trl_jax.losses.pairwise",
}
__all__ = sorted(_WHERE)

# Names on TRL's door that this release does not have.
_PLANNED = frozenset(
    """
    BEMACallback DPOConfig DPOTrainer DatasetMixtureConfig DistillationConfig DistillationTrainer GRPOConfig GRPOTrainer
    KTOConfig KTOTrainer LogCompletionsCallback RLOOConfig RLOOTrainer RichProgressCallback SFTConfig SFTTrainer
    SyncRefModelCallback WeaveCallback add_response_schema apply_chat_template clone_chat_template
    create_reference_model extract_prompt get_dataset get_peft_config get_quantization_config
    get_training_chat_template init_zero_verbose is_conversational is_conversational_from_value
    maybe_apply_chat_template maybe_convert_to_chatml maybe_extract_prompt maybe_unpair_preference_dataset pack_dataset
    prepare_multimodal_messages supports_tool_calling unpair_preference_dataset
    """.split()
)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    if name in _PLANNED:
        raise ImportError(
            f"trl_jax has no {name}: it is one of TRL's names that this release does not build. "
            f"It has {', '.join(sorted(_WHERE))}."
        )
    raise AttributeError(f"module 'trl_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
