"""A config.json that has been read: one value, handed along, so that nobody reads the file again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from trl_jax.hub.checkpoint.tensor_map import Names
from trl_jax.hub.config.objects import config_object
from trl_jax.hub.config.reader import read_config
from trl_jax.hub.families import Family, read_arch
from trl_jax.hub.heads import CONFIG_VALUES, Draw, Head, HeadName
from trl_jax.hub.load_arguments import not_taken
from trl_jax.models.functional import abstract

PASSED_OVER = {"use_cache"}  # values that scripts give any model, also one whose config has none: nothing reads them
# What is saved decides them, whatever the config object says.
_OF_FILES = {
    "architectures", "dtype", "tie_word_embeddings", "torch_dtype", "transformers_version", "vocab_size",
    "vocab_size_per_layer_input",
}  # fmt: skip


@dataclass(frozen=True)
class NativeConfig:
    """A config.json of a family: read once, and handed to whatever loads, saves or adapts the checkpoint.

    Attributes:
        path: the file.
        raw: its content.
        family, arch: its meaning; every key has been accounted for.
        head: the head that the trunk gets.
    """

    path: Path
    raw: dict[str, Any] = field(repr=False)
    family: Family
    arch: Any
    head: Head

    @property
    def names(self) -> Names:
        """Our modules, trunk and head -> theirs."""
        return self.family.names(self.arch) | dict(self.head.names)

    def model(self) -> nnx.Module:
        """The module that computes it; to be looked at abstractly."""
        return self.head.model(self.arch)

    @property
    def abstract(self) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
        """The module's graph and the shape of each of its parameters."""
        graph, shapes = _abstract(self.head.model, self.arch)
        return graph, dict(shapes)

    def draws(self) -> list[Draw]:
        """The tensors that a checkpoint may lack."""
        return self.head.draws(self.arch)

    @property
    def is_tied(self) -> bool:
        """Whether its head is the table of tokens."""
        return self.head.kind == "lm" and self.arch.tied_embeddings

    def untied(self) -> NativeConfig:
        """The same model with a head of its own; itself where it has one."""
        if not self.is_tied:
            return self
        raw = self.raw | {"tie_word_embeddings": False}
        return replace(self, raw=raw, arch=replace(self.arch, tied_embeddings=False))


@cache
def _abstract(model: Callable[[Any], nnx.Module], arch: Any) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
    """Made once for an architecture: loading, an adapter, a reference and a plan each ask for it."""
    return abstract(lambda: model(arch))


def native_config(raw: dict[str, Any], path: Path, head: HeadName = "score") -> NativeConfig:
    """The meaning of a config.json that has been read.

    Raises:
        ValueError: a model_type, key or value that is not supported, by name.
    """
    family, arch = read_arch(raw, path)
    return NativeConfig(path, raw, family, arch, _head_of(family, head, path))


def read_native_config(folder: Path, head: HeadName = "score") -> NativeConfig:
    """The config.json of a folder.

    Raises:
        FileNotFoundError, ValueError: there is none, or it says what is not supported.
    """
    return native_config(read_config(folder), folder / "config.json", head)


def transformers_config(raw: dict[str, Any], path: Path, head: HeadName) -> Any:
    """The config object of transformers: what tokenizers, trackers and scripts ask `model.config` for.

    Raises:
        ValueError: its class refuses a value.
    """
    config = config_object(raw, str(path), name_or_path=path.parent, **CONFIG_VALUES[head])
    if head == "score":
        config.use_cache = False
    return config


def with_values(raw: dict[str, Any], values: dict[str, Any], path: Path, head: HeadName) -> dict[str, Any]:
    """A config.json in which `values` that its config object has stand in the place of its own, as transformers'
    from_pretrained takes them among its arguments.

    A value of PASSED_OVER is left out where the config object has none.

    Raises:
        TypeError: the config object has no such value.
    """
    if not values:
        return raw
    config = transformers_config(raw, path, head)
    known = config.to_dict().keys() | config.attribute_map.keys()
    values = {name: value for name, value in values.items() if name in known or name not in PASSED_OVER}
    if unknown := values.keys() - known:
        raise not_taken(unknown)
    named = {config.attribute_map.get(name, name): value for name, value in values.items()}
    older = ("rope_theta", "rope_scaling") if "rope_parameters" in named else ()  # which say the same
    found = {name: value for name, value in raw.items() if name not in older} | named
    if "num_hidden_layers" in named and isinstance(found.get("layer_types"), list):
        found["layer_types"] = found["layer_types"][: named["num_hidden_layers"]]
    return found


def changes(config: Any, raw: dict[str, Any], path: Path, head: HeadName) -> dict[str, Any]:
    """The keys of a config object that are not as in the config.json that it was made of, those of a part of it under
    its name: what a run and its script have set."""
    loaded = transformers_config(raw, path, head)
    return _different(*(json.loads(one.to_json_string(use_diff=False)) for one in (loaded, config)))


def _different(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in now.items():
        if key in _OF_FILES or key.startswith("_") or (key in before and before[key] == value):
            continue
        parts = isinstance(value, dict) and isinstance(before.get(key), dict)
        found[key] = _different(before[key], value) if parts else value
    return found


def _head_of(family: Family, head: HeadName, path: Path) -> Head:
    """The head of that name for a family."""
    found = {"score": family.score_head, "lm": family.lm_head}[head]
    if found is None:
        raise ValueError(
            f"{path}: model_type {family.model_type!r} reads in both directions and has no causal language model. Pass "
            "a checkpoint of a decoder: llama, qwen3, gpt2."
        )
    return found
