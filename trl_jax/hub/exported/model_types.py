"""Model types that are no family here: those that are exported, and those that are refused, with the reason."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from trl_jax.core.printable import brief
from trl_jax.hub.exported.refused import REFUSED
from trl_jax.hub.heads import HeadName
from trl_jax.hub.torch import bridge


def is_exported(raw: dict[str, Any], native: Collection[str], source: Path, head: HeadName = "score") -> bool:
    """Whether a checkpoint of this config.json is computed by exporting it; `native` types are not.

    Raises:
        ImportError: it is, but torch is not installed.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind in native or kind in REFUSED or kind not in _types(head):
        return False
    if not bridge.available():
        raise ImportError(
            f"{source}: model_type {kind!r} is computed by exporting transformers' own model, which takes torch. "
            f"Install it: pip install 'trl_jax[torch]'. Without torch there are {', '.join(sorted(native))}."
        )
    return True


def objection(raw: dict[str, Any], native: Collection[str], source: Path) -> ValueError:
    """The error of a config.json that is not supported: the type, the reason, the nearest that works."""
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in REFUSED:
        reason, nearest = REFUSED[kind]
        return ValueError(
            f"{source}: model_type {kind!r} is not supported: {reason}. The nearest that works: {nearest}."
        )
    others = set(_types("score")) - set(REFUSED) - set(native)
    custom = " Its custom code (auto_map) is never run." if raw.get("auto_map") else ""
    return ValueError(
        f"{source}: model_type {brief(kind)} is not supported by this release of trl_jax.{custom} "
        f"Supported: {', '.join(sorted(native))}. Where torch is installed, {len(others)} other types that "
        "transformers has a sequence classifier for: bloom, gpt_neo, albert and so on."
    )


def _types(head: HeadName) -> Collection[str]:
    """The types that transformers has a model with this head for."""
    from transformers.models.auto import modeling_auto

    if head == "lm":
        return modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
