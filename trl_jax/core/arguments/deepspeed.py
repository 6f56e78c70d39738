"""Finds where a DeepSpeed config differs from the arguments; `core.arguments.parallel` reads its stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Key of the file -> the argument with the same meaning.
_SAME = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "bf16.enabled": "bf16",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.eps": "adam_epsilon",
}
_ADAM = ("Adam", "AdamW")


def conflicts(config: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """A line for each setting of the file that differs from the arguments; "auto" stands for the argument's value."""
    differences = []
    for place, argument in _SAME.items():
        wanted = _at(config, place)
        if wanted not in (None, "auto") and wanted != values[argument]:
            differences.append(
                f"deepspeed sets {place} to {wanted!r}, but {argument} is {values[argument]!r}. Make them equal, or "
                f'write "auto" in the file.'
            )
    return differences + _others(config, values)


def _others(config: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    differences = []
    total = config.get("train_batch_size", "auto")
    product = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    if total != "auto" and (not isinstance(total, int) or total % product):
        differences.append(
            f"deepspeed sets train_batch_size to {total!r}, but it is devices x per_device_train_batch_size x "
            f'gradient_accumulation_steps, a multiple of {product}. Write "auto" in the file.'
        )
    if _at(config, "fp16.enabled") is True:
        differences.append(
            "deepspeed asks for fp16, whose loss scaling is not built here. Set bf16 in the file instead."
        )
    if _at(config, "optimizer.type") not in (None, "auto", *_ADAM):
        differences.append(
            f"deepspeed names the optimizer {_at(config, 'optimizer.type')!r}. Leave it out and set optim instead."
        )
    if "scheduler" in config and _at(config, "scheduler.type") not in ("auto", "WarmupDecayLR"):
        differences.append(
            f"deepspeed names the scheduler {_at(config, 'scheduler.type')!r}. Leave it out and set "
            "lr_scheduler_type instead."
        )
    return differences


def _at(config: Mapping[str, Any], place: str) -> Any:
    for name in place.split("."):
        if not isinstance(config, Mapping) or name not in config:
            return None
        config = config[name]
    return config
