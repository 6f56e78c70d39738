"""One small file a model_type: what its config means (`arch`) and how its modules are called (`names`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import numpy as np
from flax import nnx

from trl_jax.core.torch_random import TorchGenerator
from trl_jax.hub.checkpoint.tensor_map import Names
from trl_jax.hub.config.reader import ConfigReader
from trl_jax.hub.exported.model_types import objection
from trl_jax.models.arch import Arch
from trl_jax.models.heads import SequenceScorer


@dataclass(frozen=True)
class Draw:
    """A tensor that a checkpoint may lack: normal with `std`, or all `fill` without one.

    With `cutoff`, what lies more than so many standard deviations from 0 is drawn again.
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


def score_head(arch: Arch) -> list[Draw]:
    return [Draw("score.weight", arch.initializer_range)]


@dataclass(frozen=True)
class Family:
    """What the rest of the hub needs to know about a model_type.

    Attributes:
        architecture: the class of transformers that loads what is saved.
        arch, names: what a config means; how modules are called on disk.
        scorer: the module that computes it.
        drawn: the tensors that a checkpoint may lack, in the order in which transformers draws them; where it draws
            one twice, the last counts.
        base_prefix: opens the name of every tensor but the head's; the checkpoint of a bare base leaves it out.
        other_prefixes: what stands in its place in checkpoints of other times; kept on save.
        moved: (what stands in names on disk, what transformers' modules have in its place).
        heads: how the names of the head's tensors begin; the prefix is not theirs.
        language_head: the tensor of a causal model that is dropped; None where there are no such models.
        ignored: regular expressions of tensors that checkpoints carry; dropped where the model has no use for them.
        carried: a regular expression of tensors that no text is computed with; they are saved as they came.
        in_transformers: whether `architecture` exists there.
    """

    model_type: str
    architecture: str
    arch: Callable[[ConfigReader], Any]
    names: Callable[[Any], Names]
    scorer: Callable[[Any], nnx.Module] = SequenceScorer
    drawn: Callable[[Any], list[Draw]] = score_head
    base_prefix: str = "model."
    other_prefixes: tuple[str, ...] = ()
    moved: tuple[tuple[str, str], ...] = ()
    heads: tuple[str, ...] = ("score.",)
    language_head: str | None = "lm_head.weight"
    ignored: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$", r"^lm_head\.bias$")
    carried: str | None = None
    in_transformers: bool = True


_REQUIRED = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}


@cache
def families() -> dict[str, Family]:
    """The family of every file here, by model_type."""
    found = [import_module(f"{__name__}.{module.name}").FAMILY for module in iter_modules(__path__)]
    return {family.model_type: family for family in found}


def family_of(raw: dict[str, Any], source: Path) -> Family:
    """The family of a config.json.

    Raises:
        ValueError: no model_type, or one that is not supported; the message lists those that are.
    """
    found = raw.get("model_type")
    if not isinstance(found, str) or found not in families():
        raise objection(raw, families(), source)
    return families()[found]


def read_arch(raw: dict[str, Any], source: Path) -> tuple[Family, Any]:
    """The family and the facts of a config.json; every key it holds has been accounted for."""
    family = family_of(raw, source)
    reader = ConfigReader(raw, str(source), _defaults(family.model_type))
    arch = family.arch(reader)
    reader.finish()
    return family, arch


def read_text_arch(config: ConfigReader, model_type: str, arch: Callable[[ConfigReader], Any]) -> Any:
    """The facts of `text_config`, whose sizes may be left to the class."""
    reader = ConfigReader(config.section("text_config"), f"{config.source}: text_config", _defaults(model_type, ()))
    found = arch(reader)
    reader.finish()
    return found


def _defaults(model_type: str, without: Collection[str] = _REQUIRED) -> dict[str, Any]:
    """What transformers' config class takes where a key is absent. Sizes have no default: none would fit."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    given = {field.name: field.default for field in dataclasses.fields(config_class)}
    if isinstance(config_class.default_theta, float):  # some have one for each kind of layer
        given["rope_theta"] = config_class.default_theta
    return {
        key: value
        for key, value in given.items()
        if value is not None and value is not dataclasses.MISSING and key not in without
    }
