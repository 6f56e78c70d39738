"""Heads in checkpoints: one under another name, a language model's that is dropped, and the config.json to save."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
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
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return (names | modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)[family.model_type]


def of_other_head(config: NativeConfig, name: str) -> bool:
    """Whether a tensor belongs to the head that the model does not get."""
    family = config.family
    return name in family.language_heads or (
        config.head.kind == "lm" and name.startswith(family.score_head.prefixes)
    )


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


def check_dropped(config: NativeConfig, on_disk: Collection[str]) -> None:
    """Raise ValueError where the language model's head that config.json speaks of is not there: such a checkpoint may
    be broken, even if that head is dropped."""
    heads, named = config.family.language_heads, str((config.raw.get("architectures") or [""])[0])
    if config.head.kind == "lm" or not heads or not named.endswith("ForCausalLM"):
        return
    if not config.arch.tied_embeddings and not set(heads) & set(on_disk):
        raise ValueError(
            f"{config.path.parent}: config.json says architectures=[{named!r}] and tie_word_embeddings=false, but the "
            f"weights have no {heads[0]}. Set tie_word_embeddings to true if the head is the embedding."
        )


def has_own_head(config: NativeConfig, files: Files, on_disk: Mapping[str, str], embedding: str) -> bool:
    """Whether there is a language model's head that is not the table of tokens, which config.json takes it for: as in
    transformers, the files are right. `embedding` is the full name of that table."""
    head = next((name for name in config.family.language_heads if name in on_disk), None)
    if not config.is_tied or head is None or embedding not in on_disk:
        return False
    if np.array_equal(files.read(on_disk[head]), files.read(on_disk[embedding])):
        return False
    logger.warning(
        "%s: config.json says tie_word_embeddings=true, but %s differs from %s: the head has its own weights, here as "
        "in transformers, and is saved so.", config.path.parent, head, on_disk[embedding],
    )  # fmt: skip
    return True


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
    if "text_config" not in raw:  # older files have its keys among their own
        changed = dict(changed)
        changed |= changed.pop("text_config", {})
    return _with(written, changed)


def _with(written: dict[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    inner = {key: value for key, value in changed.items() if isinstance(value, dict)}
    parts = {key: _with(written[key], value) for key, value in inner.items() if isinstance(written.get(key), dict)}
    return written | dict(changed) | parts
