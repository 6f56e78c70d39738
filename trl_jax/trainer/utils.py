"""Small things that scripts import from `trl.trainer.utils`."""

from __future__ import annotations

from typing import Any

import numpy as np

from trl_jax.core.argument_rules import HERE
from trl_jax.trainer.model_config import ModelConfig


def get_peft_config(model_args: ModelConfig) -> None:
    """None, for the whole model is trained.

    Raises:
        ValueError: `use_peft` asks for an adapter.
    """
    if model_args.use_peft:
        raise ValueError(f"use_peft=True is not {HERE}: train the whole model, or adapt it with TRL.")


def get_quantization_config(model_args: ModelConfig) -> None:
    """None, for weights are loaded whole.

    Raises:
        ValueError: `load_in_4bit` or `load_in_8bit` asks for quantised weights.
    """
    for name in ("load_in_4bit", "load_in_8bit"):
        if vars(model_args)[name]:
            raise ValueError(f"{name}=True is not {HERE}: load the whole weights; dtype='bfloat16' halves them.")


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
    counted = labels != -100
    return {"accuracy": float(np.mean(found[counted] == labels[counted]))}
