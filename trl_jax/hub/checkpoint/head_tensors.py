"""Heads in checkpoints: one under another name, a language model's that is dropped, and the config.json to save."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from trl_jax.hub.checkpoint.array_reader import Files
from trl_jax.hub.config.native import NativeConfig
from trl_jax.hub.families import Family
from trl_jax.hub.heads import HeadName

logger = logging.getLogger(__name__)


def architecture(family: Family, head: HeadName) -> str:
    """The class of transformers that loads what is saved."""
    if head == "score":
        return f"{family.class_prefix}ForSequenceClassification"
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]


def of_other_head(config: NativeConfig, name: str) -> bool:
    """Whether a tensor belongs to the head that the model does not get."""
    if config.head.kind == "score":
        return name == config.family.language_head
    return name == config.family.language_head or name.startswith(config.family.score_head.prefixes)


def adopt(
    config: NativeConfig, files: Files, on_disk: dict[str, str], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Take a head of another name for `score.weight`: the one tensor that nothing else accounts for, if it has the
    head's shape. Changes `on_disk`, full name -> name on disk; `wanted` has the shapes of the model's tensors."""
    unknown = sorted(name for name in set(on_disk) - set(wanted) if not of_other_head(config, name))
    if "score.weight" not in set(wanted) - set(on_disk) or len(unknown) != 1:
        return
    name = on_disk[unknown[0]]
    if files.shapes[name] == tuple(wanted["score.weight"]):
        folder = config.path.parent
        logger.warning("%s: %s has the shape of the score head and is read, and saved, as score.weight.", folder, name)
        on_disk["score.weight"] = on_disk.pop(unknown[0])


def check_dropped(config: NativeConfig, files: Files, on_disk: Mapping[str, str], embedding: str) -> None:
    """Raise ValueError where the language model's head contradicts the config: such a checkpoint may be broken, even if
    that head is dropped. `embedding` is the full name of the table of tokens."""
    head, folder = config.family.language_head, config.path.parent
    if head is None:
        return
    tied = config.arch.tied_embeddings
    named = str((config.raw.get("architectures") or [""])[0])
    if config.head.kind == "score" and not tied and head not in on_disk and named.endswith("ForCausalLM"):
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


def saved_config(config: NativeConfig, *, dtype: str, changed: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the checkpoint's config.json for a model with this head: the keys TRL's save changes, and no others.

    Args:
        dtype: the name of the dtype on disk.
        changed: keys that a run or its script has set, such as the ids of tokens; those of a part, such as text_config,
            under its name.
    """
    raw, head = config.raw, config.head.kind
    written = {**raw, "architectures": [architecture(config.family, head)]}
    if head == "score":
        written |= {"use_cache": False, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        written.pop("num_labels", None)  # transformers derives it from id2label
    written.pop("torch_dtype", None)
    written["dtype"] = dtype
    return _with(written, changed)


def _with(written: dict[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    inner = {key: value for key, value in changed.items() if isinstance(value, dict)}
    parts = {key: _with(written[key], value) for key, value in inner.items() if isinstance(written.get(key), dict)}
    return written | dict(changed) | parts
