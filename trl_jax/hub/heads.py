"""Heads on disk, both ways: the tensors of a head, those it replaces, how a new one is drawn, and what it is called.

Transformers, PEFT and checkpoints each have names for the head; they stand here, so that the rest of `hub` is about
trunks. There is one head today, the score head: one number a text.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from flax import nnx

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.models.heads import SequenceScorer

if TYPE_CHECKING:
    from trl_jax.hub.checkpoint.array_reader import Files
    from trl_jax.hub.config.native import NativeConfig
    from trl_jax.hub.families import Family
    from trl_jax.hub.peft.lora_config import LoraConfig
    from trl_jax.hub.peft.modules import Module

logger = logging.getLogger(__name__)

HeadName = Literal["score"]

TASK_TYPE = "SEQ_CLS"  # PEFT's name for a model with this head
_PEFT_HEADS = ("score", "classifier")  # attributes that PEFT takes for the head of such a model
_PEFT_SAVED = ["classifier", "score"]  # what PEFT appends to its modules_to_save
CONFIG_VALUES = {"num_labels": 1}  # what a config object of transformers is made with
ONE_LABEL = "A reward model has one score a sequence (1 label)."


@dataclass(frozen=True)
class Draw:
    """A tensor that a checkpoint may lack: normal with `std`, or all `fill` without one.

    With `cutoff`, values further than so many standard deviations from 0 are drawn again.
    """

    tensor: str
    std: float | None = None
    cutoff: float | None = None
    fill: float = 0.0

    def values(self, generator: TorchGenerator, shape: tuple[int, ...]) -> np.ndarray:
        if self.std is None:
            return np.full(shape, self.fill)
        count = math.prod(shape)
        if self.cutoff is None:
            return generator.normal(count, self.std).reshape(shape)
        return generator.truncated_normal(count, self.std, self.cutoff * self.std).reshape(shape)


def _draw_score(arch: Any) -> list[Draw]:
    return [Draw("score.weight", arch.initializer_range)]


@dataclass(frozen=True)
class ScoreHead:
    """The score head of a family; the defaults are those of decoders.

    Attributes:
        model: makes the module of trunk and head from the arch.
        names: (our module, its name on disk); none where the family's own names have the head among them.
        prefixes: how the names of the head's tensors on disk begin.
        draws: the tensors that a checkpoint may lack, in the order in which transformers draws them; where it draws
            one twice, the last counts.
    """

    model: Callable[[Any], nnx.Module] = SequenceScorer
    names: tuple[tuple[str, str], ...] = (("score", "score"),)
    prefixes: tuple[str, ...] = ("score.",)
    draws: Callable[[Any], list[Draw]] = _draw_score


def head_of(family: Family, head: HeadName) -> ScoreHead:
    """The head of that name for a family."""
    return {"score": family.score_head}[head]


def check_labels(num_labels: int) -> None:
    """Raise ValueError unless there is one label."""
    if num_labels != 1:
        raise ValueError(
            f"num_labels is {num_labels}, but reward models require `num_labels=1`: one score a sequence. Leave it out."
        )


def architecture(family: Family) -> str:
    """The class of transformers that loads what is saved."""
    return f"{family.class_prefix}ForSequenceClassification"


def adopt(
    config: NativeConfig, files: Files, on_disk: dict[str, str], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Take a head of another name for `score.weight`: the one tensor that nothing else accounts for, if it has the
    head's shape. Changes `on_disk`, full name -> name on disk; `wanted` has the shapes of the model's tensors."""
    unknown = sorted(set(on_disk) - set(wanted) - {config.family.language_head})
    if "score.weight" not in set(wanted) - set(on_disk) or len(unknown) != 1:
        return
    name = on_disk[unknown[0]]
    if files.shapes[name] == tuple(wanted["score.weight"]):
        folder = config.path.parent
        logger.warning("%s: %s has the shape of the score head and is read, and saved, as score.weight.", folder, name)
        on_disk["score.weight"] = on_disk.pop(unknown[0])


def check_dropped(config: NativeConfig, files: Files, on_disk: Mapping[str, str], embedding: str) -> None:
    """Raise ValueError where the language model's head contradicts the config. It is dropped either way, but such a
    checkpoint may be broken. `embedding` is the full name of the table of tokens."""
    head, folder = config.family.language_head, config.path.parent
    if head is None:
        return
    tied = config.arch.tied_embeddings
    named = str((config.raw.get("architectures") or [""])[0])
    if not tied and head not in on_disk and named.endswith("ForCausalLM"):
        raise ValueError(
            f"{folder}: config.json says architectures=[{named!r}] and tie_word_embeddings=false, but the "
            f"weights have no {head}. Set tie_word_embeddings to true if the head is the embedding."
        )
    if tied and head in on_disk and embedding in on_disk:
        if not np.array_equal(files.read(on_disk[head]), files.read(on_disk[embedding])):
            raise ValueError(
                f"{folder}: config.json says tie_word_embeddings=true, but {head} differs from {on_disk[embedding]}. "
                "Set it to false, or remove the tensor."
            )


def saved_config(
    config: NativeConfig, *, dtype: str, pad_token_id: int | None, eos_token_id: int | list[int] | None
) -> dict[str, Any]:
    """A copy of the checkpoint's config.json for a model with this head: the keys TRL's save changes, and no others.

    Args:
        dtype: the name of the dtype on disk.
        pad_token_id: the id before which texts are read; None leaves the key as it is.
        eos_token_id: the end of a text; None leaves the key as it is.
    """
    raw = config.raw
    written = {**raw, "architectures": [architecture(config.family)], "use_cache": False}
    written.pop("num_labels", None)  # transformers derives it from id2label
    written["id2label"], written["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
    written.pop("torch_dtype", None)
    written["dtype"] = dtype
    ids = {"pad_token_id": pad_token_id, "eos_token_id": eos_token_id}
    known = {key: value for key, value in ids.items() if value is not None}
    if not isinstance(raw.get("text_config"), dict):
        return written | known
    written["text_config"] = raw["text_config"] | known  # where transformers looks for them
    return written | {key: value for key, value in known.items() if key in raw}


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
