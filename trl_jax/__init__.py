"""trl_jax: TRL's trainers on JAX. Change `from trl import ...` to `from trl_jax import ...`.

Imports are lazy: each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from trl_jax.core.text import api_boundary
from trl_jax.core.trainers import NEAR, WHERE, check_not_experimental, lazy_getattr, placeholder

if TYPE_CHECKING:  # what type checkers and editors see
    from trl_jax.chat_template_utils import (
        add_response_schema,
        clone_chat_template,
        get_training_chat_template,
        setup_chat_format,
        supports_tool_calling,
    )
    from trl_jax.cli.trl_alias import install
    from trl_jax.config.base import BaseConfig
    from trl_jax.core.torch_random import set_seed
    from trl_jax.data_utils import (
        apply_chat_template,
        extract_prompt,
        is_conversational,
        is_conversational_from_value,
        maybe_apply_chat_template,
        maybe_convert_to_chatml,
        maybe_extract_prompt,
        maybe_unpair_preference_dataset,
        pack_dataset,
        prepare_multimodal_messages,
        unpair_preference_dataset,
    )
    from trl_jax.hub.auto import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
        AutoPeftModelForCausalLM,
        AutoPeftModelForSequenceClassification,
        get_peft_model,
    )
    from trl_jax.hub.peft_config import (
        LoraConfig,
        PrefixTuningConfig,
        PromptEncoderConfig,
        PromptEncoderReparameterizationType,
        PromptTuningConfig,
        PromptTuningInit,
        TaskType,
    )
    from trl_jax.hub.pretrained import PreTrainedModel, token_logps_and_entropies
    from trl_jax.hub.quantization import BitsAndBytesConfig
    from trl_jax.legacy.collators import (
        ConstantLengthDataset,
        DataCollatorForCompletionOnlyLM,
        RewardDataCollatorWithPadding,
    )
    from trl_jax.losses.supervised import pairwise_loss
    from trl_jax.scripts.data import DatasetMixtureConfig, get_dataset
    from trl_jax.scripts.utils import ScriptArguments, TrlParser, init_zero_verbose
    from trl_jax.trainer.base_trainer import BaseTrainer
    from trl_jax.trainer.callbacks import BEMACallback, LogCompletionsCallback, RichProgressCallback
    from trl_jax.trainer.cpo_config import CPOConfig
    from trl_jax.trainer.cpo_trainer import CPOTrainer
    from trl_jax.trainer.distillation_config import DistillationConfig
    from trl_jax.trainer.distillation_trainer import DistillationTrainer
    from trl_jax.trainer.dpo_config import DPOConfig
    from trl_jax.trainer.dpo_trainer import DPOTrainer
    from trl_jax.trainer.grpo_config import GRPOConfig
    from trl_jax.trainer.grpo_trainer import GRPOTrainer
    from trl_jax.trainer.kto_config import KTOConfig
    from trl_jax.trainer.kto_trainer import KTOTrainer
    from trl_jax.trainer.model_config import ModelConfig
    from trl_jax.trainer.online import OnlineConfig, OnlineTrainer
    from trl_jax.trainer.orpo_config import ORPOConfig
    from trl_jax.trainer.orpo_trainer import ORPOTrainer
    from trl_jax.trainer.reference import ReferenceConfig, ReferenceTrainer
    from trl_jax.trainer.reward_config import RewardConfig
    from trl_jax.trainer.reward_trainer import RewardTrainer
    from trl_jax.trainer.rloo_config import RLOOConfig
    from trl_jax.trainer.rloo_trainer import RLOOTrainer
    from trl_jax.trainer.sft_config import SFTConfig
    from trl_jax.trainer.sft_trainer import SFTTrainer
    from trl_jax.trainer.utils import (
        compute_accuracy,
        get_kbit_device_map,
        get_peft_config,
        get_quantization_config,
        is_npu_available,
        is_peft_available,
        is_xpu_available,
    )
    from trl_jax.training.callbacks import TimeLimitCallback
    from trl_jax.training.reference import create_reference_model

__version__ = "0.1.0"

# If transformers is imported later: suppress its warning that no models are available without torch.
logging.getLogger("transformers").addFilter(lambda record: not record.getMessage().startswith("PyTorch was not found."))

_WHERE = WHERE | {
    "AutoModelForCausalLM": "trl_jax.hub.auto",
    "AutoModelForImageTextToText": "trl_jax.hub.auto",
    "AutoModelForSequenceClassification": "trl_jax.hub.auto",
    "AutoPeftModelForCausalLM": "trl_jax.hub.auto",
    "AutoPeftModelForSequenceClassification": "trl_jax.hub.auto",
    "BEMACallback": "trl_jax.trainer.callbacks",
    "BaseConfig": "trl_jax.config.base",
    "BaseTrainer": "trl_jax.trainer.base_trainer",
    "BitsAndBytesConfig": "trl_jax.hub.quantization",
    "ConstantLengthDataset": "trl_jax.legacy.collators",
    "DataCollatorForCompletionOnlyLM": "trl_jax.legacy.collators",
    "DatasetMixtureConfig": "trl_jax.scripts.data",
    "LogCompletionsCallback": "trl_jax.trainer.callbacks",
    "LoraConfig": "trl_jax.hub.peft_config",
    "ModelConfig": "trl_jax.trainer.model_config",
    "OnlineConfig": "trl_jax.trainer.online",
    "OnlineTrainer": "trl_jax.trainer.online",
    "PreTrainedModel": "trl_jax.hub.pretrained",
    "PrefixTuningConfig": "trl_jax.hub.peft_config",
    "PromptEncoderConfig": "trl_jax.hub.peft_config",
    "PromptEncoderReparameterizationType": "trl_jax.hub.peft_config",
    "PromptTuningConfig": "trl_jax.hub.peft_config",
    "PromptTuningInit": "trl_jax.hub.peft_config",
    "ReferenceConfig": "trl_jax.trainer.reference",
    "ReferenceTrainer": "trl_jax.trainer.reference",
    "RewardDataCollatorWithPadding": "trl_jax.legacy.collators",
    "RichProgressCallback": "trl_jax.trainer.callbacks",
    "ScriptArguments": "trl_jax.scripts.utils",
    "TaskType": "trl_jax.hub.peft_config",
    "TimeLimitCallback": "trl_jax.training.callbacks",
    "TrlParser": "trl_jax.scripts.utils",
    "add_response_schema": "trl_jax.chat_template_utils",
    "apply_chat_template": "trl_jax.data_utils",
    "clone_chat_template": "trl_jax.chat_template_utils",
    "compute_accuracy": "trl_jax.trainer.utils",
    "create_reference_model": "trl_jax.training.reference",
    "extract_prompt": "trl_jax.data_utils",
    "get_dataset": "trl_jax.scripts.data",
    "get_kbit_device_map": "trl_jax.trainer.utils",
    "get_peft_config": "trl_jax.trainer.utils",
    "get_peft_model": "trl_jax.hub.auto",
    "get_quantization_config": "trl_jax.trainer.utils",
    "get_training_chat_template": "trl_jax.chat_template_utils",
    "init_zero_verbose": "trl_jax.scripts.utils",
    "install": "trl_jax.cli.trl_alias",
    "is_conversational": "trl_jax.data_utils",
    "is_conversational_from_value": "trl_jax.data_utils",
    "is_npu_available": "trl_jax.trainer.utils",
    "is_peft_available": "trl_jax.trainer.utils",
    "is_xpu_available": "trl_jax.trainer.utils",
    "maybe_apply_chat_template": "trl_jax.data_utils",
    "maybe_convert_to_chatml": "trl_jax.data_utils",
    "maybe_extract_prompt": "trl_jax.data_utils",
    "maybe_unpair_preference_dataset": "trl_jax.data_utils",
    "pack_dataset": "trl_jax.data_utils",
    "pairwise_loss": "trl_jax.losses.supervised",
    "prepare_multimodal_messages": "trl_jax.data_utils",
    "set_seed": "trl_jax.core.torch_random",
    "setup_chat_format": "trl_jax.chat_template_utils",
    "supports_tool_calling": "trl_jax.chat_template_utils",
    "token_logps_and_entropies": "trl_jax.hub.pretrained",
    "unpair_preference_dataset": "trl_jax.data_utils",
}
_MODULES = ("chat_template_utils", "data_utils", "rewards", "scripts", "trainer")  # submodules that `trl` exposes
__all__ = sorted(_WHERE)

_fetch = lazy_getattr(__name__, _WHERE)


@api_boundary
def __getattr__(name: str) -> Any:
    if name.endswith(("ForCausalLM", "ForConditionalGeneration", "ForSequenceClassification")) and name not in _WHERE:
        from trl_jax.hub.auto import class_of_family

        return class_of_family(name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name[:1] != "_" and name not in _WHERE:
        check_not_experimental(name)
        if name in NEAR:
            return placeholder(name)
    return _fetch(name)


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext trl_jax` in a notebook makes `import trl` import trl_jax."""
    _fetch("install")()


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
