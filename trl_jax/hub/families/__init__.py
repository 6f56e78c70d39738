"""One small file a model_type: what its config means (`arch`) and how its tensors are called (`table`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_jax.hub.config import ConfigReader
from trl_jax.hub.long_tail import objection
from trl_jax.hub.wires import Wire
from trl_jax.models.arch import Arch


@dataclass(frozen=True)
class Family:
    """What the rest of the hub needs to know about a model_type.

    `base_prefix` opens the name of every tensor but the head; the checkpoint of a bare base leaves it out.
    `ignored` are regular expressions of tensors that old checkpoints carry and nobody reads.
    """

    model_type: str
    architecture: str
    arch: Callable[[ConfigReader], Arch]
    table: Callable[[Arch], list[Wire]]
    base_prefix: str = "model."
    ignored: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$",)


def families() -> dict[str, Family]:
    """Every supported model_type, by name."""
    from trl_jax.hub.families import llama, qwen2, qwen3

    return {family.model_type: family for family in (llama.FAMILY, qwen2.FAMILY, qwen3.FAMILY)}


def family_of(raw: dict[str, Any], source: Path) -> Family:
    """The family of a config.json.

    Raises:
        ValueError: no model_type, or one that is not supported; the message lists those that are.
    """
    known = families()
    found = raw.get("model_type")
    if not isinstance(found, str) or found not in known:
        raise objection(raw, known, source)
    return known[found]


def read_arch(raw: dict[str, Any], source: Path) -> tuple[Family, Arch]:
    """The family and the facts of a config.json; every key it holds has been accounted for."""
    family = family_of(raw, source)
    reader = ConfigReader(raw, str(source))
    arch = family.arch(reader)
    reader.finish()
    return family, arch
