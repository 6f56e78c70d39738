"""Small things that scripts import from `trl.trainer.utils`."""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_jax.core.trainers import fetching
from trl_jax.hub.peft_config import LoraConfig
from trl_jax.hub.quantization import BitsAndBytesConfig
from trl_jax.hub.torch_bridge import peft_available
from trl_jax.trainer.model_config import ModelConfig

# Other names that TRL had in this module once.
_OLD = (
    "ConstantLengthDataset", "DataCollatorForCompletionOnlyLM", "RewardDataCollatorWithPadding",
    "SIMPLE_CHAT_TEMPLATE", "SIMPLE_QUERY_CHAT_TEMPLATE", "SIMPLE_SFT_CHAT_TEMPLATE",
)  # fmt: skip
__getattr__ = fetching(__name__, dict.fromkeys(_OLD, "trl_jax.legacy.collators"))


def get_peft_config(model_args: ModelConfig) -> LoraConfig | None:
    """The adapter that the flags describe; None without `use_peft`.

    Raises:
        ValueError: a flag's value that no adapter can have.
    """
    if not model_args.use_peft:
        return None
    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        target_modules=model_args.lora_target_modules,
        target_parameters=model_args.lora_target_parameters,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        modules_to_save=model_args.lora_modules_to_save,
    )


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    """How the flags ask the frozen weights to be held; None for as they are stored."""
    if not model_args.load_in_4bit and not model_args.load_in_8bit:
        return None
    return BitsAndBytesConfig(
        load_in_4bit=model_args.load_in_4bit,
        load_in_8bit=model_args.load_in_8bit,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
    )


def is_peft_available() -> bool:
    """Whether peft is installed; adapters need none of it here."""
    return peft_available()


def is_xpu_available() -> bool:
    """False: arrays lie where JAX puts them, and torch's devices are not asked for."""
    return False


def is_npu_available() -> bool:
    """False, as `is_xpu_available`."""
    return False


def get_kbit_device_map() -> None:
    """None: JAX places arrays, quantised ones too."""


def compute_accuracy(eval_pred: Any) -> dict[str, float]:
    """The share of rows whose largest logit is the label's; entries with label -100 do not count.

    Args:
        eval_pred: (logits `[N, C]` or `[N, T, C]`, labels `[N]` or `[N, T]`).

    Raises:
        ValueError: there are no labels, as in a RewardTrainer's evaluation, which reports accuracy itself.
    """
    predictions, labels = eval_pred
    if len(labels) == 0:
        raise ValueError("There are no labels: RewardTrainer reports eval_accuracy itself. Leave compute_metrics out.")
    labels, found = np.asarray(labels), np.argmax(np.asarray(predictions), axis=-1)
    labelled = labels != -100
    return {"accuracy": float(np.mean(found[labelled] == labels[labelled]))}
