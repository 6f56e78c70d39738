"""PEFT's names for the heads of models."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.heads import HeadName
from trl_jax.hub.peft.lora_config import LoraConfig
from trl_jax.hub.peft.modules import Module

_TASKS = {"score": "SEQ_CLS", "lm": "CAUSAL_LM"}  # PEFT's names for models with these heads
_LM_HEAD = "lm_head"  # our module
_PEFT_HEADS = ("score", "classifier")  # attributes that PEFT takes for the head of such a model
_PEFT_SAVED = ["classifier", "score"]  # what PEFT appends to its modules_to_save


def with_peft_head(lora: LoraConfig, modules: list[Module], kind: HeadName) -> tuple[LoraConfig, str | None]:
    """The adapter's config as PEFT makes it for a model with a head of this kind, and a line on what was changed: under
    another task PEFT would make another model. The head of a classifier trains too, and is in `modules_to_save`."""
    if kind == "lm":
        return _of_causal_lm(lora)
    saved, task, own = list(lora.modules_to_save or []), lora.task_type, _TASKS[kind]
    if task is not None:
        changed = f"task_type={task!r} becomes {own!r}, with which the head trains too."
        saved = saved if saved[-2:] == _PEFT_SAVED else [*saved, *_PEFT_SAVED]
        return replace(lora, task_type=own, modules_to_save=saved), None if task == own else changed
    head = next(name for name in _PEFT_HEADS if _has(modules, name))
    if any(head.endswith(name) for name in saved):
        return lora, None
    added = f"the head {head!r} is added to modules_to_save, so that it trains and is saved."
    return replace(lora, modules_to_save=[*saved, head]), added


def _of_causal_lm(lora: LoraConfig) -> tuple[LoraConfig, str | None]:
    task, own = lora.task_type, _TASKS["lm"]
    if task in (None, own):
        return lora, None
    return replace(lora, task_type=own), f"task_type={task!r} becomes {own!r}: the model predicts tokens."


def is_lm_head(module: Module) -> bool:
    """Whether it is the head of a language model."""
    return any(path == _LM_HEAD for path, _ in module.parts)


def peft_head(lora: LoraConfig, modules: list[Module]) -> str | None:
    """The head that PEFT leaves out of "all-linear": a language model's, or of a classifier an attribute of that name,
    whatever is in it."""
    head = next((module.name for module in modules if is_lm_head(module)), None)
    if head is not None:
        return head
    if lora.task_type != _TASKS["score"]:
        return None
    return next((name for name in _PEFT_HEADS if _has(modules, name)), None)


def _has(modules: list[Module], name: str) -> bool:
    return any(module.name.split(".")[0] == name for module in modules)
