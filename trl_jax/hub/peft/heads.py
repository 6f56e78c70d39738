"""PEFT's names for the head of a model."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.peft.lora_config import LoraConfig
from trl_jax.hub.peft.modules import Module

TASK_TYPE = "SEQ_CLS"  # PEFT's name for a model with this head
_PEFT_HEADS = ("score", "classifier")  # attributes that PEFT takes for the head of such a model
_PEFT_SAVED = ["classifier", "score"]  # what PEFT appends to its modules_to_save


def with_peft_head(lora: LoraConfig, modules: list[Module]) -> tuple[LoraConfig, str | None]:
    """The adapter's config with the head in `modules_to_save`, as PEFT makes it for a classifier, and a line on what
    was added or changed. Under another task PEFT would make another model, so that becomes SEQ_CLS."""
    saved, task = list(lora.modules_to_save or []), lora.task_type
    if task is not None:
        changed = f"task_type={task!r} becomes {TASK_TYPE!r}, with which the head trains too."
        saved = saved if saved[-2:] == _PEFT_SAVED else [*saved, *_PEFT_SAVED]
        return replace(lora, task_type=TASK_TYPE, modules_to_save=saved), None if task == TASK_TYPE else changed
    head = next(name for name in _PEFT_HEADS if _has(modules, name))
    if any(head.endswith(name) for name in saved):
        return lora, None
    added = f"the head {head!r} is added to modules_to_save, so that it trains and is saved."
    return replace(lora, modules_to_save=[*saved, head]), added


def peft_head(lora: LoraConfig, modules: list[Module]) -> str | None:
    """The head that PEFT leaves out of "all-linear": an attribute of that name, whatever is in it."""
    if lora.task_type != TASK_TYPE:
        return None
    return next((name for name in _PEFT_HEADS if _has(modules, name)), None)


def _has(modules: list[Module], name: str) -> bool:
    return any(module.name.split(".")[0] == name for module in modules)
