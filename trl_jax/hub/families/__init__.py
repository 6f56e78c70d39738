"""One file per model family. For each model_type, it defines how to read a config (`arch`) and the names of tensors on
disk (`names`). Vision-language models share one file for their text models: `vlm_text`.

A file defines `FAMILY`, or `FAMILIES` if it has several model types. The suffixes `_v2`, `_moe` and so on distinguish
the functions of different model types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from trl_jax.hub.config_reader import ConfigReader, config_class, is_unread
from trl_jax.hub.heads import Head, ScoreHead, lm_head
from trl_jax.hub.model_types import unsupported_error
from trl_jax.hub.tensor_map import Names


@dataclass(frozen=True)
class Family:
    """What the rest of the hub needs to know about a model_type.

    Attributes:
        class_prefix: prefix of its class names in transformers.
        arch: reads the architecture from a config.
        names: maps an architecture to the names of its modules on disk.
        score_head, lm_head: its heads on disk; lm_head is None if there is no causal model.
        base_prefix: prefix of all tensor names except for the head's. Checkpoints of a bare base model omit it.
        other_prefixes: the same prefix in older or newer checkpoints; kept on save.
        other_head: the name of the `lm_head` module in such checkpoints.
        moved: (part of a name on disk, the corresponding part of the name in transformers' modules).
        ignored: regular expressions of tensors in checkpoints; dropped if the model does not use them.
        carried: a regular expression of tensors that do not affect texts; saved unchanged.
        in_float32: a regular expression of tensors that stay float32 if the model is loaded in 16 bits (transformers'
            `_keep_in_fp32_modules_strict`).
        linear_router: whether transformers' expert router is a linear layer that PEFT can adapt like others.
        in_transformers: whether transformers has a class of this model with the score head.
        mean_of_micro_batches: whether transformers averages the loss of a step over its micro-batches, regardless of
            their numbers of targets (`accepts_loss_kwargs = False`).
        has_text_class: whether transformers' AutoModelForCausalLM loads a separate text-only class, which averages over
            targets.
    """

    model_type: str
    class_prefix: str
    arch: Callable[[ConfigReader], Any]
    names: Callable[[Any], Names]
    score_head: ScoreHead = ScoreHead()
    lm_head: Head | None = lm_head()
    base_prefix: str = "model."
    other_prefixes: tuple[str, ...] = ()
    other_head: str | None = None
    moved: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$", r"^lm_head\.bias$")
    carried: str | None = None
    in_float32: str | None = None
    linear_router: bool = False
    in_transformers: bool = True
    mean_of_micro_batches: bool = False
    has_text_class: bool = False

    @property
    def language_heads(self) -> tuple[str, ...]:
        """The possible names of the LM head's tensor, starting with the current one; () without a head."""
        modules = () if self.lm_head is None else (self.lm_head.names[0][1], self.other_head)
        return tuple(f"{module}.weight" for module in modules if module is not None)


_REQUIRED = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}


@cache
def families() -> dict[str, Family]:
    """All families here, by model_type."""
    modules = [vars(import_module(f"{__name__}.{module.name}")) for module in iter_modules(__path__)]
    every = [family for module in modules for family in module.get("FAMILIES") or (module["FAMILY"],)]
    return {family.model_type: family for family in sorted(every, key=lambda family: family.model_type)}


def family_of(raw: dict[str, Any], source: Path) -> Family:
    """The family of a config.json.

    Raises:
        ValueError: no model_type, or an unsupported one; the message lists the supported ones.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in families():
        raise unsupported_error(raw, families(), source)
    return families()[model_type]


def read_arch(raw: dict[str, Any], source: Path) -> tuple[Family, Any]:
    """The family and the architecture of a config.json. Every key has been read or refused."""
    family = family_of(raw, source)
    kind = config_class(family.model_type)
    reader = ConfigReader(raw, str(source), _defaults(kind))
    arch = family.arch(reader)
    reader.finish(partial(is_unread, kind))
    return family, arch


def read_section(raw: dict[str, Any], source: str, model_type: str, arch: Callable[[ConfigReader], Any]) -> Any:
    """The architecture in a section of a config.json; absent sizes come from the config class of this model_type."""
    kind = config_class(model_type)
    reader = ConfigReader(raw, source, _defaults(kind, ()))
    architecture = arch(reader)
    reader.finish(partial(is_unread, kind))
    return architecture


def _defaults(kind: Any, without: Collection[str] = _REQUIRED) -> dict[str, Any]:
    """The defaults of transformers' config class for absent keys. Sizes have no default, because none would fit."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    if isinstance(kind.default_theta, float):  # some have a theta for each layer type
        defaults["rope_theta"] = kind.default_theta
    return {
        key: value
        for key, value in defaults.items()
        if value is not None and value is not dataclasses.MISSING and key not in without
    }
